"""Tokens of identity providers: the library that verifies them is loaded where a provider is configured."""

from __future__ import annotations

import subprocess
import sys


def test_a_gateway_without_providers_does_not_load_pyjwt() -> None:
    program = (
        "import sys, gateway.lifecycle\n"
        "from importlib import import_module\n"
        "before = 'jwt' in sys.modules\n"
        "import_module(gateway.app.TOKENS)\n"
        "print(before, 'jwt' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False True"
