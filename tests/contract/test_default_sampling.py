"""What a catalog may say of sampling is what a caller may say, and reaches the engine whole."""

from __future__ import annotations

import msgspec
import pytest
from pydantic import ValidationError

from gateway.api.openai.chat_body import ChatBody
from workers.protocol.catalog import DefaultSampling
from workers.protocol.requests import Sampling

NAMES = [field.name for field in msgspec.structs.fields(DefaultSampling)]
PROBES = (-3, -2, -1, -0.1, 0, 0.5, 1, 2, 2.1, 10, 10.1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 10**12)


def taken_by_a_catalog(name: str, value: float) -> bool:
    try:
        msgspec.convert({name: value}, DefaultSampling)
    except msgspec.ValidationError:
        return False
    return True


def taken_from_a_caller(name: str, value: float) -> bool:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    try:
        ChatBody.model_validate({**body, name: value})
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_the_bounds_are_those_of_a_request(name: str) -> None:
    catalog = [value for value in PROBES if taken_by_a_catalog(name, value)]
    assert catalog == [value for value in PROBES if taken_from_a_caller(name, value)]
    assert 0 < len(catalog) < len(PROBES)


def test_each_parameter_reaches_the_engine() -> None:
    assert [field.name for field in msgspec.structs.fields(Sampling)] == NAMES
    values = dict.fromkeys(NAMES, 1)
    assert DefaultSampling(**values).sampling() == Sampling(**values)
    assert DefaultSampling(top_k=5, seed=-1).sampling() == Sampling(top_k=5)
