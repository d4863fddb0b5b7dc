"""Declares all settings of a gateway, and those of `paddock up`. `workers/settings.py` finds their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from accounts.settings import AccountsSettings, GatewaySecret
from workers.settings import SupervisorSettings, WorkerSettings


class GatewaySettings(GatewaySecret):
    """One gateway process."""

    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0: any free one")] = 8080
    admin_port: Annotated[
        int,
        Field(
            ge=0,
            le=65535,
            description="port of its own for what is for admins: keys, teams, users, spending, loading of models and "
            "adapters; on the other port these are a 404; 0: there is no such port",
        ),
    ] = 0
    tls_cert: Annotated[
        Path | None,
        Field(
            description="certificate (PEM, with those that vouch for it) with which the port speaks TLS; read anew "
            "when the file changes"
        ),
    ] = None
    tls_key: Annotated[
        Path | None, Field(description="key of tls_cert (PEM, without a password); unset: it is in tls_cert's file")
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        Field(
            description="authorities (PEM) of the certificates that clients must show; only `/health` and `/ready` are "
            "answered without one"
        ),
    ] = None
    uds: Annotated[
        Path | None, Field(description="path of a Unix socket to listen on in place of the port; it carries no TLS")
    ] = None
    uds_mode: Annotated[
        str, Field(pattern=r"^0?[0-7]{3}$", description="permissions of that socket, in octal digits")
    ] = "0660"
    gateway_id: Annotated[
        str,
        Field(
            pattern=r"^\S*$", description="id of this gateway process, without blanks; empty: a new one at each start"
        ),
    ] = ""
    listen_fds: Annotated[
        str,
        Field(
            pattern=r"^(\d+(,\d+)?)?$",
            description="descriptors of sockets that listen already, which `paddock up` sets: the port's, and, if it "
            "runs several gateways, that of a port that is this gateway's alone; empty: host and port are listened on",
        ),
    ] = ""
    counts_fd: Annotated[
        int,
        Field(
            ge=0,
            description="descriptor of the file in which gateways that share a port count their connections, which "
            "`paddock up` sets; 0: this gateway has the port alone",
        ),
    ] = 0
    admin_fd: Annotated[
        int,
        Field(
            ge=0,
            description="descriptor of the socket that listens on admin_port, which `paddock up` sets; 0: host and "
            "admin_port are listened on",
        ),
    ] = 0
    gateway_targets: Annotated[
        str,
        Field(
            description="addresses (host:port, with commas between them) at which each gateway of one `paddock up` is "
            "scraped, which it sets if it runs several; empty: every port shows the metrics"
        ),
    ] = ""
    catalog: Annotated[
        Path | None, Field(description="catalog file (YAML or JSON): names the models and their aliases")
    ] = None
    api_key: Annotated[str, Field(description="presets the first API key; empty: one is made at the first start")] = ""
    api_keys: Annotated[
        str,
        Field(
            description="JSON list of further keys: {name, team, sha256, aliases, admin, weight, ...}; see docs/keys.md"
        ),
    ] = "[]"
    open: Annotated[
        bool,
        Field(
            description="let calls from this machine in without an API key, as an admin; for one's own machine, and "
            "only while host is loopback"
        ),
    ] = False
    max_connections: Annotated[
        int,
        Field(
            ge=0,
            description="most connections at once; idle ones make room, further ones get a 503, probes are still "
            "answered; 0: what the limit of open files leaves, 8,192 at most",
        ),
    ] = 0
    address_share: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="share of max_connections that one address may have; 1: all of them, where every caller comes "
            "through one proxy",
        ),
    ] = 0.5
    trusted_proxies: Annotated[
        str,
        Field(
            description="proxies whose `x-forwarded-for` and `x-forwarded-proto` tell a caller's address and scheme: "
            "networks such as `10.0.0.0/8` with commas between them, `unix` for whoever connects by the Unix socket; "
            "empty: nobody's count"
        ),
    ] = ""
    accounts_url: Annotated[
        str,
        Field(
            description="accounts service to forward to what needs a database: `http://HOST:PORT`, or `unix:PATH` of "
            "its socket; empty: such routes are not served"
        ),
    ] = ""
    key_share: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="share of max_connections that requests of one key may have under way; further ones get a 429; "
            "those of all keys of a team may have three quarters, or this if it is more",
        ),
    ] = 0.5
    usage_stream_max: Annotated[
        int,
        Field(
            ge=16,
            description="most entries of the stream in which usage of calls travels through Redis, each of 100 calls "
            "at most; what does not fit waits on the gateways' disks",
        ),
    ] = 2000
    usage_journal_mib: Annotated[
        int,
        Field(
            ge=1,
            description="most usage of calls that this gateway keeps on disk while the database takes none, MiB (about "
            "3,000 calls each); further records are dropped, and counted",
        ),
    ] = 256
    metrics_key: Annotated[
        str,
        Field(
            description="what `/metrics` and `/metrics/targets` ask for as `Authorization: Bearer`; empty: for "
            "nothing. Set it where callers reach them"
        ),
    ] = ""
    metrics_endpoint: Annotated[
        bool,
        Field(description="answer `GET /metrics` and `/metrics/targets`; false: 501, as llama-server without them"),
    ] = True
    console: Annotated[
        bool,
        Field(
            description="answer `GET /ui` with the console, a page for browsers that shows nothing without a key; "
            "false: 501"
        ),
    ] = True
    grafana_url: Annotated[str, Field(description="address of Grafana, to which the console links for admins")] = ""
    runbook_url: Annotated[str, Field(description="address of your runbook, to which the console links for admins")] = (
        ""
    )
    slots_endpoint: Annotated[
        bool, Field(description="answer `GET /slots`; false: 501, as llama-server with `--no-slots`")
    ] = True
    max_body_bytes: Annotated[int, Field(ge=1024, description="largest request body")] = 8 << 20
    max_media_body_mib: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="largest request body with pictures and sounds, MiB; its text alone may have max_body_bytes. "
            "Also the most that the pictures and sounds of one request may have together",
        ),
    ] = 32
    max_media_mib: Annotated[int, Field(ge=1, le=64, description="largest picture or sound, MiB")] = 20
    media_allowed_hosts: Annotated[
        str,
        Field(
            description="hosts from which pictures, sounds and documents may be fetched that callers name by URL, with "
            "commas between them: names, or `*.example.com` for all names below, at ports 80 and 443 unless another "
            "(`name:8080`) or all (`name:*`) are named; empty: nothing is fetched"
        ),
    ] = ""
    media_allow_private: Annotated[
        bool,
        Field(
            description="whether these hosts may have addresses of private networks or of the gateway's own machine; "
            "link-local ones, and those of clouds' metadata, never"
        ),
    ] = False
    media_timeout_s: Annotated[float, Field(gt=0, le=60, description="longest time of one such fetch")] = 10.0
    unknown_parameters: Annotated[
        Literal["ignore", "refuse"],
        Field(
            description="what becomes of parameters that Paddock does not know, or does nothing with: `ignore` answers "
            "and names them in the header `x-paddock-ignored`, `refuse` is a 400"
        ),
    ] = "ignore"
    call_memory_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="most memory that requests may hold together, from their first byte to their answer's end; a "
            "team may have as much as is free beside it; 0: twenty times max_body_bytes or six times "
            "max_media_body_mib, whichever is more, at least 192 MiB",
        ),
    ] = 0
    queue_timeout_s: Annotated[
        float, Field(gt=0, description="longest wait for a slot before the caller gets a 503")
    ] = 60.0
    start_timeout_s: Annotated[
        float,
        Field(
            ge=0,
            description="longest wait of a call while its model has no worker; then it waits for a slot; "
            "0: as queue_timeout_s",
        ),
    ] = 0.0
    ready_wait_s: Annotated[
        float,
        Field(
            ge=0,
            description="longest time from the start in which `/ready` waits for a first worker of each model of the "
            "catalog that has `workers`; 0: until they have come",
        ),
    ] = 300.0
    max_queue: Annotated[int, Field(ge=0, description="most calls that wait per model; further ones get a 429")] = 1000
    max_queue_per_team: Annotated[
        int, Field(ge=0, description="most calls of one team that wait per model; further ones get a 429")
    ] = 500
    retry_share: Annotated[
        float,
        Field(ge=0, le=1, description="share of a model's calls that may be tried again; 10 in 10 s always may"),
    ] = 0.2
    request_timeout_s: Annotated[float, Field(gt=0, description="longest life of one call, queueing included")] = 3600.0
    answer_timeout_s: Annotated[
        float,
        Field(
            ge=0,
            description="longest time of one answer from its first token on, where its key says nothing else; "
            "0: as request_timeout_s",
        ),
    ] = 0.0
    ping_interval_s: Annotated[
        float, Field(gt=0, description="how often a streaming caller that waits gets a ping")
    ] = 15.0
    ping: Annotated[
        Literal["comment", "event"],
        Field(
            description="what a ping is: `comment` tells where the caller stands in line, as server-sent events have "
            "it; `event` is an empty event of the stream's own kind, for clients that take each piece for an event"
        ),
    ] = "comment"
    stream_buffer_events: Annotated[
        int, Field(ge=16, description="events a slow client may fall behind before its stream is cut off")
    ] = 2048
    reader_timeout_s: Annotated[
        float,
        Field(gt=0, description="how long a client may read nothing, its buffers full, before its connection is cut"),
    ] = 30.0
    drain_s: Annotated[float, Field(ge=0, description="how long a stopping gateway lets running streams finish")] = 15.0
    resume_ttl_s: Annotated[
        float, Field(gt=0, le=86_400, description="how long a stream that may be resumed can be read after its end")
    ] = 300.0
    resume_buffer_bytes: Annotated[
        int, Field(ge=4096, description="how far back one such stream can be read again, in this process and in Redis")
    ] = 4 << 20
    resume_streams_per_team: Annotated[
        int,
        Field(ge=1, le=10_000, description="most such streams of one team that run at a time; further ones get a 429"),
    ] = 256
    resume_bytes_per_team: Annotated[
        int,
        Field(
            ge=1 << 16,
            description="most bytes of such streams per team, over all gateways; ended ones make room, and of many "
            "that run each keeps less",
        ),
    ] = 16 << 20
    response_ttl_s: Annotated[
        float, Field(ge=1, description="how long a stored response stays in Redis; continuing from it begins anew")
    ] = 86_400.0
    responses_bytes_per_team: Annotated[
        int, Field(ge=0, description="most bytes of stored responses per team; the oldest make room, 0 keeps none")
    ] = 64 << 20
    max_sockets: Annotated[int, Field(ge=1, description="most WebSockets at once; further ones get a 503")] = 2048
    max_sockets_per_key: Annotated[
        int,
        Field(
            ge=1,
            description="most WebSockets of one key at once; further ones get a 429, and so do those beyond three "
            "quarters of max_sockets for all keys of a team",
        ),
    ] = 256
    socket_bytes_per_team: Annotated[
        int,
        Field(
            ge=0,
            description="most bytes of responses that a team's WebSockets remember, those that are stored nowhere "
            "else; the oldest conversations make room",
        ),
    ] = 64 << 20
    socket_idle_s: Annotated[
        float, Field(gt=0, description="how long a WebSocket stays open without a request under way")
    ] = 900.0
    socket_life_s: Annotated[
        float, Field(gt=0, description="how long a WebSocket takes requests; what runs then is finished")
    ] = 3600.0
    trace_share: Annotated[
        float, Field(ge=0, le=1, description="share of the traces that begin at this gateway which are recorded")
    ] = 1.0
    log_prompts: Annotated[
        bool,
        Field(description="write prompts and answers into the log, at level info; whoever reads it reads them"),
    ] = False


class UpSettings(GatewaySettings, AccountsSettings, SupervisorSettings):
    """`paddock up`: the gateways, the supervisor and a private Redis on one machine."""

    usual: ClassVar[tuple[str, ...]] = (
        *("model", "hf", "alias", "catalog", "models_dir", "host", "port"),
        *("workers", "slots", "ctx", "gpus", "api_key", "open", "state_dir"),
    )
    """The settings that the help page has first."""

    gateways: Annotated[
        int,
        BeforeValidator(lambda value: 0 if value == "auto" else value),
        Field(
            ge=0,
            le=64,
            description="gateway processes that share the port; with more than one, each has a port of its own beside, "
            "for probes and metrics; auto, or 0: one for every 4 workers, and at most one for every 2 cores",
        ),
    ] = 1
    accounts: Annotated[
        bool,
        Field(description="run the accounts service too: teams, keys, budgets and usage, in a database"),
    ] = True


def known_settings() -> frozenset[str]:
    """Return the names of all settings of Paddock, whichever process reads them."""
    return frozenset(UpSettings.model_fields) | frozenset(WorkerSettings.model_fields)
