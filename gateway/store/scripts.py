"""Loads the Lua scripts from `lua/`: key names are put in front, and the SHA-1 identifies them for EVALSHA."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from workers.protocol import keys

FOLDER = Path(__file__).parent / "lua"

ONE_PER_MODEL = (
    keys.workers,
    keys.leased,
    keys.queue,
    keys.tickets,
    keys.fence,
    keys.fair,
    keys.swept,
    keys.settling,
)
"""Keys that a model has once; the script's variable is `<function>_key`."""

MANY_PER_MODEL = (keys.worker, keys.worker_leases, keys.lease, keys.ticket, keys.ticket_bids)
"""Keys that a model has many of; the script's function is `<function>_key(id)`."""


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    source: str
    sha: str


def key_names() -> str:
    """Return Lua code that builds every key name from the prefix in KEYS[1], so that only `keys` declares names."""
    prefix = keys.model_prefix("")
    lines = [f'local {name.__name__}_key = KEYS[1] .. "{name("").removeprefix(prefix)}"' for name in ONE_PER_MODEL]
    for by_id in MANY_PER_MODEL:
        before, _, after = by_id("", "%").removeprefix(prefix).partition("%")
        built = f'KEYS[1] .. "{before}" .. id' + (f' .. "{after}"' if after else "")
        lines.append(f"local function {by_id.__name__}_key(id) return {built} end")
    return "\n".join(lines) + "\n"


def load_script(name: str, *beside: str) -> Script:
    """Return `lua/<name>.lua` below the key names, `lua/shared.lua` and the files `beside`."""
    shared = [(FOLDER / f"{part}.lua").read_text("utf-8") for part in ("shared", *beside)]
    return _script(name, "\n".join([key_names(), *shared]))


def load_response_script(name: str) -> Script:
    """Return `lua/<name>.lua` below the key names of one team's stored responses."""
    prefix = keys.responses("")
    after = keys.response("", "").removeprefix(prefix)
    names = (
        "local responses_key = KEYS[1]",
        f'local response_sizes_key = KEYS[1] .. "{keys.response_sizes("").removeprefix(prefix)}"',
        f'local function response_key(id) return KEYS[1] .. "{after}" .. id end',
    )
    return _script(name, "\n".join(names))


def load_stream_script(name: str) -> Script:
    """Return `lua/<name>.lua` below the key names of one team's resumable streams."""
    prefix = keys.streams("")
    names = (
        "local streams_key = KEYS[1]",
        f'local streams_ended_key = KEYS[1] .. "{keys.streams_ended("").removeprefix(prefix)}"',
        f'local stream_sizes_key = KEYS[1] .. "{keys.stream_sizes("").removeprefix(prefix)}"',
    )
    return _script(name, "\n".join(names))


def load_beat_script() -> Script:
    """Return `lua/beat.lua`, which gets its whole key as an argument."""
    return _script("beat", "")


def load_news_script() -> Script:
    """Return `lua/news.lua`, which gets its whole key as an argument."""
    return _script("news", "")


def load_members_script() -> Script:
    """Return `lua/members.lua`, which gets its whole keys as arguments."""
    return _script("members", "")


def load_records_script() -> Script:
    """Return `lua/records.lua`, which gets its whole keys as arguments."""
    return _script("records", "")


def _script(name: str, head: str) -> Script:
    source = head + "\n" + (FOLDER / f"{name}.lua").read_text("utf-8")
    # SHA-1 is the name of a script in Redis, not a safeguard.
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
