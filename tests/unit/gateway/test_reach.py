"""Which gateway `paddock chat` and `paddock bench` call."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.commands import target
from gateway.settings import GatewaySettings
from workers import sources


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("", "http://127.0.0.1:9"),
        ("0.0.0.0", "http://127.0.0.1:9"),
        ("::", "http://[::1]:9"),
        ("::2", "http://[::2]:9"),
        ("gateway", "http://gateway:9"),
    ],
)
def test_who_listens_on_all_addresses_is_called_at_the_machines_own(host: str, url: str, tmp_path: Path) -> None:
    flags = ["--host", host, "--port", "9", "--state-dir", str(tmp_path)]
    assert target.find(None, sources.read(GatewaySettings, flags, prog="paddock chat")).url == url
