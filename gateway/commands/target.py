"""Finds the gateway that `paddock chat` and `bench` call, and writes what `paddock up` prints when it is ready."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.access import first_key
from gateway.settings import GatewaySettings
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


def welcome(
    address: str, key: str, kept_in: Path | None, models: tuple[str, ...], logs: Path, targets: Sequence[str] = ()
) -> str:
    """Return the text that `paddock up` prints when it is ready. Its snippets are not indented, so that they can be
    pasted.

    `address`: without `/v1`. `key`: empty if another gateway on the same Redis made the first key. `kept_in`: the file
    that has the key; None: no file has it. `targets`: addresses at which each of several gateways shows its metrics."""
    shown = f"{key}{f' (kept in {kept_in})' if kept_in else ''}" if key else OTHERS_KEY
    bearer = f"Bearer {key or NO_KEY}"
    metrics = f"\n  metrics  of each gateway: {', '.join(targets)}" if targets else ""
    body = {"model": models[0], "stream": True, "messages": [{"role": "user", "content": PROMPT}]}
    curl = shlex.join(
        [
            *("curl", "-N", f"{address}/v1/chat/completions"),
            *("-H", f"Authorization: {bearer}", "-H", "Content-Type: application/json", "-d", json.dumps(body)),
        ]
    )
    return f"""
  address  {address}/v1
  API key  {shown}
  models   {", ".join(models)}
  logs     {logs}{metrics}

# in a shell
{curl}

# in Python, with nothing installed; any OpenAI client takes the same address (base_url) and key (api_key)
import json, urllib.request
body = json.dumps({body!r}).encode()
ask = urllib.request.Request("{address}/v1/chat/completions", body, {{"Authorization": {json.dumps(bearer)}}})
for line in urllib.request.urlopen(ask):
    if line.startswith(b"data: {{"):
        print(json.loads(line[6:])["choices"][0]["delta"].get("content") or "", end="", flush=True)

Ctrl-C stops everything.
"""


@dataclass(frozen=True, slots=True)
class Access:
    """The address of the gateway to call, and the API key to send."""

    url: str
    key: str
    key_from: str
    """Where the key came from, in words for a person who has to correct it."""


def find(url: str | None, reading: sources.Reading[GatewaySettings]) -> Access:
    """Find the gateway to call: at `url`, else where the settings say, else that of `paddock up` on this machine."""
    settings = reading.settings
    if url:
        # A key that was made for this machine is not sent elsewhere.
        return Access(
            url if "://" in url else f"http://{url}",
            settings.api_key,
            "give the key of that server with --api-key",
        )
    told = any(reading.origins[name] != "default" for name in ("host", "port"))
    running = address_file(settings.state_dir.expanduser())
    address = sockets.url_of(settings.host, settings.port)
    if not told and running.is_file():
        address = running.read_text(encoding="utf-8").strip()
    if settings.api_key:
        return Access(address, settings.api_key, f"the key came from {reading.origins['api_key']}")
    path = first_key.path_in(settings.state_dir)
    try:
        return Access(address, path.read_text(encoding="utf-8").strip(), f"the key came from {path}")
    except OSError:
        return Access(address, "", f"there is no key in {path}; give one with --api-key")
