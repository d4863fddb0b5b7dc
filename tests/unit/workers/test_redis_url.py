"""Which URLs name a Redis, what is wrong with others, and that no message tells a password."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.redis.url import BadRedisUrl, Login, RedisUrl, Tls, checked, masked, parse


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://", RedisUrl("server", (("localhost", 6379),))),
        ("redis://cache", RedisUrl("server", (("cache", 6379),))),
        ("redis://cache:7000/3", RedisUrl("server", (("cache", 7000),), db=3)),
        ("REDIS://cache?db=3", RedisUrl("server", (("cache", 6379),), db=3)),
        ("redis://[::1]:7000", RedisUrl("server", (("::1", 7000),))),
        ("redis://:p%40ss@cache", RedisUrl("server", (("cache", 6379),), login=Login("", "p@ss"))),
        ("redis://me:p:a@ss@cache", RedisUrl("server", (("cache", 6379),), login=Login("me", "p:a@ss"))),
        ("unix:///run/redis.sock?db=2", RedisUrl("socket", path="/run/redis.sock", db=2)),
        ("unix://:secret@/run/redis.sock", RedisUrl("socket", path="/run/redis.sock", login=Login("", "secret"))),
        ("rediss://cache", RedisUrl("server", (("cache", 6379),), tls=Tls())),
        (
            "rediss://cache?ssl_ca_certs=/ca.pem&ssl_certfile=/me.pem&ssl_keyfile=/me.key&ssl_check_hostname=no",
            RedisUrl("server", (("cache", 6379),), tls=Tls("/ca.pem", "/me.pem", "/me.key", check_hostname=False)),
        ),
        (
            "rediss://cache?ssl_cert_reqs=none",
            RedisUrl("server", (("cache", 6379),), tls=Tls(check_hostname=False, verify=False)),
        ),
        ("redis+sentinel://a,b:7000", RedisUrl("sentinel", (("a", 26379), ("b", 7000)), service="mymaster")),
        ("redis+sentinel://a/main/2", RedisUrl("sentinel", (("a", 26379),), db=2, service="main")),
        ("redis+sentinel://a/2", RedisUrl("sentinel", (("a", 26379),), db=2, service="mymaster")),
        (
            "redis+sentinel://me:one@a/main?db=1&sentinel_username=you&sentinel_password=two",
            RedisUrl(
                "sentinel",
                (("a", 26379),),
                db=1,
                login=Login("me", "one"),
                service="main",
                sentinel_login=Login("you", "two"),
            ),
        ),
        ("rediss+sentinel://a?service=main", RedisUrl("sentinel", (("a", 26379),), tls=Tls(), service="main")),
        ("redis+cluster://a,b:7000,[::1]", RedisUrl("cluster", (("a", 6379), ("b", 7000), ("::1", 6379)))),
        ("rediss+cluster://:x@a/0", RedisUrl("cluster", (("a", 6379),), login=Login("", "x"), tls=Tls())),
    ],
)
def test_what_a_url_says(url: str, place: RedisUrl) -> None:
    assert parse(url) == place


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://x", "must begin with redis://, .* or rediss\\+cluster://"),
        ("cache:6379", "must begin with"),
        ("redis://cache:port", "%XX"),
        ("redis://cache:0", "1 to 65535"),
        ("redis://cache:99999", "1 to 65535"),
        ("redis://::1", "\\[IPv6\\]:port"),
        ("redis://a,b", "2 hosts .* redis\\+sentinel:// or redis\\+cluster://"),
        ("redis://cache/first", "not a number"),
        ("redis://cache/0/1", "more behind the hosts"),
        ("redis://cache?db=x", "not a number"),
        ("redis://cache?db=1&db=2", "db is given twice"),
        ("redis://cache?ssl_ca_certs=/ca.pem", "ssl_ca_certs needs TLS: .* rediss"),
        ("redis://cache?service=x", "service is for redis\\+sentinel://"),
        ("rediss://cache?ssl_ca_cert=/ca.pem", "did you mean ssl_ca_certs"),
        ("rediss://cache?ssl_keyfile=/me.key", "give ssl_certfile as well"),
        ("rediss://cache?ssl_cert_reqs=maybe", "required or none"),
        ("rediss://cache?ssl_check_hostname=maybe", "yes or no"),
        ("redis+cluster://a/1", "database 0 only"),
        ("unix://redis.sock", "must be whole"),
    ],
)
def test_what_is_wrong_with_a_url(url: str, words: str) -> None:
    with pytest.raises(BadRedisUrl, match=words):
        parse(url)


SECRET = "hush+1/2?3#4@5:6"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://me:{SECRET}@cache:port",
        f"redis://:{SECRET}@cache/x",
        f"redis://:{SECRET}cache",
        f"mysql://me:{SECRET}@cache",
        f"unix://:{SECRET}@relative",
        f"redis+sentinel://a?sentinel_password={SECRET}&db=x",
        f"redis+cluster://:{SECRET}@a/1",
    ],
)
def test_no_message_tells_a_password(url: str) -> None:
    with pytest.raises(BadRedisUrl) as caught:
        parse(url)
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://cache:6379/0", "redis://cache:6379/0"),
        ("redis://:hush@cache:6379", "redis://:********@cache:6379"),
        ("redis://me:hu@sh:x@cache", "redis://me:********@cache"),
        ("redis+sentinel://:hush@a,b/m?sentinel_password=hush&db=1", "redis+sentinel://:********@a,b/m?"),
        ("redis+sentinel://a?db=1&sentinel_password=hush", "redis+sentinel://a?db=1&sentinel_password=********"),
    ],
)
def test_what_may_be_shown_of_a_url(url: str, shown: str) -> None:
    assert masked(url).startswith(shown)
    assert "hu" not in masked(url)


def test_a_login_is_not_shown() -> None:
    assert "hush" not in repr(parse("redis+sentinel://me:hush@a?sentinel_password=hush"))


def test_a_certificate_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadRedisUrl, match=r"ssl_ca_certs: .*nothing.pem: No such file or directory; name a readable"):
        checked(f"rediss://cache?ssl_ca_certs={tmp_path}/nothing.pem")
    certificate = tmp_path / "ca.pem"
    certificate.write_text("")
    assert checked(f"rediss://cache?ssl_ca_certs={certificate}").tls == Tls(str(certificate))
