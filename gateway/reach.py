"""Finds the gateway that a command for people calls, and the key for it: `paddock chat`, `paddock bench`."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.access import first_key
from gateway.settings import GatewaySettings
from gateway.welcome import address_file
from workers import own_address, sources


@dataclass(frozen=True, slots=True)
class Access:
    """The address to call, and the key."""

    url: str
    key: str
    key_from: str
    """The source of the key, for a person: what to change where it is wrong."""


def find(url: str | None, reading: sources.Reading[GatewaySettings]) -> Access:
    """Return the gateway at `url`, else the one that the settings name, else that of `paddock up` on this machine."""
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
    address = own_address.url_of(settings.host, settings.port)
    if not told and running.is_file():
        address = running.read_text(encoding="utf-8").strip()
    if settings.api_key:
        return Access(address, settings.api_key, f"the key came from {reading.origins['api_key']}")
    path = first_key.path_in(settings.state_dir)
    try:
        return Access(address, path.read_text(encoding="utf-8").strip(), f"the key came from {path}")
    except OSError:
        return Access(address, "", f"there is no key in {path}; give one with --api-key")
