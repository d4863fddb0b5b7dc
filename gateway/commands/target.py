"""Finds the gateway that commands such as `paddock chat` call, and writes what `paddock up` prints when it is ready."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.access import first_key
from gateway.commands import logins
from gateway.commands.logins import Logins
from gateway.settings import GatewaySettings
from gateway.tls import files_of, shown
from workers import sources
from workers.process import sockets

PROMPT = "Tell me a short story about a fox."
OTHERS_KEY = (
    "<key>, made by another gateway on this Redis: it stands in that one's `first-key` file; "
    "if it is lost, set PADDOCK_API_KEY"
)


NO_KEY = "<key>"
"""Stands for the key in the snippets if this machine does not have the key."""


def address_file(state_dir: Path) -> Path:
    """Return the path of the file in which a running `paddock up` keeps its address, without `/v1`, for `paddock
    chat` to read."""
    return state_dir / "run" / "address"


@dataclass(frozen=True, slots=True)
class Address:
    """Where callers reach the gateways of `paddock up`."""

    url: str
    """Without `/v1`; with `uds` its host stands for nothing."""
    uds: Path | None = None
    """The Unix socket to connect to."""
    trusted: Path | None = None
    """The file of a certificate that clients have to be given, since nobody else vouches for it."""
    asks_certificate: bool = False
    """Whether clients have to show a certificate."""


def address_of(settings: GatewaySettings) -> Address:
    """Return where callers reach the gateways of these settings. Raises TlsUnusable."""
    if settings.uds is not None:
        return Address("http://localhost", settings.uds.absolute())
    files = files_of(settings, 1)
    if files is None:
        return Address(sockets.url_of(settings.host, settings.port))
    told = shown(files, sockets.host_of(settings.host))
    url = sockets.url_of(told.host, settings.port, "https")
    return Address(url, None, files.cert.absolute() if told.is_own else None, files.client_ca is not None)


CLIENT_FILE = "client.pem"
"""Stands in the snippets for the file of a client's certificate and key."""


def welcome(
    address: Address,
    key: str,
    kept_in: Path | None,
    models: tuple[str, ...],
    logs: Path,
    targets: Sequence[str] = (),
    *,
    has_console: bool = True,
    is_open: bool = False,
) -> str:
    """Return the text that `paddock up` prints when it is ready. Its snippets are not indented, so that they can be
    pasted.

    `key`: empty if another gateway on the same Redis made the first key. `kept_in`: the file that has the key; None: no
    file has it. `targets`: addresses at which each of several gateways shows its metrics. `is_open`: whether calls from
    this machine need no key."""
    shown_key = f"{key}{f' (kept in {kept_in})' if kept_in else ''}" if key else OTHERS_KEY
    if is_open:
        shown_key = f"none is needed on this machine (--open); for programs that insist on one: {shown_key}"
    bearer = "" if is_open else f"Bearer {key or NO_KEY}"
    metrics = f"\n  metrics  of each gateway: {', '.join(targets)}" if targets else ""
    body = {"model": models[0], "stream": True, "messages": [{"role": "user", "content": PROMPT}]}
    where = f"{address.url}/v1" if address.uds is None else f"{address.uds} (a Unix socket), {address.url}/v1"
    console = f"\n  console  {address.url}/" if address.uds is None and has_console else ""
    certificate = f"\n  clients  show a certificate: {CLIENT_FILE} below" if address.asks_certificate else ""
    return f"""
  address  {where}{console}
  API key  {shown_key}
  models   {", ".join(models)}
  logs     {logs}{metrics}{certificate}

# in a shell
{_curl(address, bearer, body)}

# in Python, with nothing installed; any OpenAI client takes the same address (base_url) and key (api_key)
{_python(address, bearer, body)}

Ctrl-C stops everything.
"""


def _curl(address: Address, bearer: str, body: dict[str, object]) -> str:
    options = []
    if address.uds is not None:
        options += ["--unix-socket", str(address.uds)]
    if address.trusted is not None:
        options += ["--cacert", str(address.trusted)]
    if address.asks_certificate:
        options += ["--cert", CLIENT_FILE]
    headers = [*(["-H", f"Authorization: {bearer}"] if bearer else []), "-H", "Content-Type: application/json"]
    return shlex.join(["curl", "-N", *options, f"{address.url}/v1/chat/completions", *headers, "-d", json.dumps(body)])


def _python(address: Address, bearer: str, body: dict[str, object]) -> str:
    made = f"body = json.dumps({body!r}).encode()"
    headers = json.dumps({"Authorization": bearer} if bearer else {"Content-Type": "application/json"})
    if address.uds is not None:
        lines = [
            *("import http.client, json, socket", made, "asked = http.client.HTTPConnection('localhost')"),
            *("asked.sock = socket.socket(socket.AF_UNIX)", f"asked.sock.connect({str(address.uds)!r})"),
            f'asked.request("POST", "/v1/chat/completions", body, {headers})',
            "for line in asked.getresponse():",
        ]
    elif address.url.startswith("https"):
        trusted = f"cafile={str(address.trusted)!r}" if address.trusted is not None else ""
        lines = [
            *("import json, ssl, urllib.request", made, f"trusted = ssl.create_default_context({trusted})"),
            *([f"trusted.load_cert_chain({CLIENT_FILE!r})"] if address.asks_certificate else []),
            f'ask = urllib.request.Request("{address.url}/v1/chat/completions", body, {headers})',
            "for line in urllib.request.urlopen(ask, context=trusted):",
        ]
    else:
        lines = [
            *("import json, urllib.request", made),
            f'ask = urllib.request.Request("{address.url}/v1/chat/completions", body, {headers})',
            "for line in urllib.request.urlopen(ask):",
        ]
    end = """    if line.startswith(b"data: {"):
        print(json.loads(line[6:])["choices"][0]["delta"].get("content") or "", end="", flush=True)"""
    return "\n".join([*lines, end])


@dataclass(frozen=True, slots=True)
class Access:
    """The address of the gateway to call, and the API key to send."""

    url: str
    key: str
    key_from: str
    """Where the key came from, in words for a person who has to correct it."""


def find(url: str | None, reading: sources.Reading[GatewaySettings]) -> Access:
    """Find the gateway to call: at `url`, else where the settings say, else that of the last `paddock login`, else that
    of `paddock up` on this machine. Raises LoginsUnreadable."""
    settings = reading.settings
    kept = logins.read(settings.state_dir)
    if url:
        # A key that was made for this machine is not sent elsewhere.
        address = url if "://" in url else f"http://{url}"
        origin = f"the key came from {reading.origins['api_key']}; " if settings.api_key else ""
        return _kept_access(address, settings, kept) or Access(
            address, settings.api_key, f"{origin}give the key of that server with --api-key"
        )
    told = any(reading.origins[name] != "default" for name in ("host", "port"))
    running = address_file(settings.state_dir.expanduser())
    address = sockets.url_of(settings.host, settings.port, "https" if settings.tls_cert else "http")
    if not told and not settings.api_key and kept.last:
        address = kept.last
    elif not told and running.is_file():
        address = running.read_text(encoding="utf-8").strip()
    if (access := _kept_access(address, settings, kept)) is not None:
        return access
    if settings.api_key:
        return Access(address, settings.api_key, f"the key came from {reading.origins['api_key']}")
    path = first_key.path_in(settings.state_dir)
    try:
        return Access(address, path.read_text(encoding="utf-8").strip(), f"the key came from {path}")
    except OSError:
        return Access(address, "", f"there is no key in {path}; give one with --api-key")


def _kept_access(address: str, settings: GatewaySettings, kept: Logins) -> Access | None:
    """Return the access that `paddock login` keeps for the address; None: it keeps none, or a key is given."""
    login = kept.at(address)
    if login is None or settings.api_key:
        return None
    return Access(address, login.key, f"the key came from `paddock login`, kept in {kept.path}; sign in again with it")
