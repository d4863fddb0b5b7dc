"""What a worker process wants to be shown, made from the secret and what `/health` tells of it."""

from __future__ import annotations

import json
import urllib.request

import aiohttp

from workers.protocol import control


async def access_headers(session: aiohttp.ClientSession, address: str, secret: str) -> dict[str, str]:
    """Return the headers that a gateway's requests to this worker carry."""
    async with session.get(f"{address}/health") as response:
        told = await response.json(content_type=None)
    return {"Authorization": f"Bearer {control.access_token(secret, told['worker'], told['boot'])}"}


def access_headers_of(address: str, secret: str) -> dict[str, str]:
    """Return the same, without an event loop."""
    told = _told(address)
    return {"Authorization": f"Bearer {control.access_token(secret, told['worker'], told['boot'])}"}


def drain_headers_of(address: str, secret: str) -> dict[str, str]:
    """Return the headers that have this worker drain."""
    told = _told(address)
    return {"Authorization": f"Bearer {control.drain_token(secret, told['worker'], told['boot'])}"}


def _told(address: str) -> dict[str, str]:
    with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
        told: dict[str, str] = json.load(answer)
        return told
