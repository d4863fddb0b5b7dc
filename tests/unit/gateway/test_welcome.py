"""What `paddock up` prints can be pasted, whatever the key looks like, and says only what is so."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

import pytest

from gateway.commands.target import Address, welcome

LOGS = Path("/logs")


def curl_of(text: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith("curl "))
    return shlex.split(line)


@pytest.mark.parametrize("key", ["pk-plain", """it's "odd" $HOME \\ `x`"""])
def test_both_snippets_carry_the_key_as_it_is(key: str) -> None:
    text = welcome(Address("http://127.0.0.1:8080"), key, None, ("m", "n"), LOGS)
    assert f"Authorization: Bearer {key}" in curl_of(text)
    snippet = ast.parse(text[text.index("import json") : text.index("Ctrl-C")])
    strings = [node.value for node in ast.walk(snippet) if isinstance(node, ast.Constant)]
    assert f"Bearer {key}" in strings
    assert "kept in" not in text


def test_the_file_is_named_where_it_holds_the_key() -> None:
    assert "API key  pk-x (kept in /state/first-key)" in welcome(
        Address("http://h"), "pk-x", Path("/state/first-key"), ("m",), LOGS
    )


def test_a_key_that_another_gateway_made_is_left_open() -> None:
    text = welcome(Address("http://[::1]:80"), "", None, ("m",), LOGS)
    assert "API key  <key>, made by another gateway on this Redis" in text
    assert "PADDOCK_API_KEY" in text
    assert {"http://[::1]:80/v1/chat/completions", "Authorization: Bearer <key>"} <= set(curl_of(text))


def test_an_open_gateways_snippets_carry_no_key() -> None:
    text = welcome(Address("http://127.0.0.1:8080"), "pk-x", None, ("m",), LOGS, is_open=True)
    assert "none is needed on this machine (--open); for programs that insist on one: pk-x" in text
    assert "Authorization" not in text
    assert "Content-Type: application/json" in curl_of(text)
    ast.parse(text[text.index("import json") : text.index("Ctrl-C")])


def test_over_tls_clients_are_given_what_they_need() -> None:
    address = Address("https://h:8443", None, Path("/my cert.pem"), asks_certificate=True)
    text = welcome(address, "k", None, ("m",), LOGS)
    assert "address  https://h:8443/v1" in text
    curl = curl_of(text)
    assert curl[2:7] == ["--cacert", "/my cert.pem", "--cert", "client.pem", "https://h:8443/v1/chat/completions"]
    snippet = ast.parse(text[text.index("import json") : text.index("Ctrl-C")])
    strings = [node.value for node in ast.walk(snippet) if isinstance(node, ast.Constant)]
    assert {"/my cert.pem", "client.pem"} <= set(strings)


def test_a_unix_socket_is_named_in_both_snippets() -> None:
    text = welcome(Address("http://localhost", Path("/run/p d.sock")), "k", None, ("m",), LOGS)
    assert "address  /run/p d.sock (a Unix socket), http://localhost/v1" in text
    assert curl_of(text)[2:5] == ["--unix-socket", "/run/p d.sock", "http://localhost/v1/chat/completions"]
    snippet = ast.parse(text[text.index("import http.client") : text.index("Ctrl-C")])
    assert "/run/p d.sock" in [node.value for node in ast.walk(snippet) if isinstance(node, ast.Constant)]
