"""What a caller gets who says nothing, as `/props` tells it, beside the real llama-server: every name and its value."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from tests.support.real_server import built_server, real_server
from tests.support.stack import SHARED_MODELS, Stack

MODEL = SHARED_MODELS / "stories260K.gguf"


def params_of(url: str, key: str = "") -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/props", headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        params: dict[str, Any] = json.load(answer)["default_generation_settings"]["params"]
        return params


@pytest.mark.long
def test_defaults_are_those_of_the_real_server() -> None:
    built_server()
    with real_server(MODEL) as url:
        theirs = params_of(url)
    with Stack() as stack:
        stack.worker(MODEL, "small", slots=1, ctx=256)
        own = params_of(stack.gateway().url, stack.key)
    assert len(theirs) > 30
    # llama-server keeps numbers in 32 bits.
    assert own == {
        name: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value for name, value in theirs.items()
    }
