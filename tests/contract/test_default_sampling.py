"""What a catalog may say of sampling is what a caller may say, and reaches the engine whole."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.api.openai.requests import read_chat
from gateway.errors import InvalidRequest
from workers.models.generation import DefaultSampling
from workers.protocol.requests import Sampling

NAMES = [field.name for field in msgspec.structs.fields(DefaultSampling)]
LISTS = ["dry_sequence_breakers", "samplers"]
NUMBERS = [name for name in NAMES if name not in LISTS]
LIST_PROBES: tuple[list[str], ...] = (
    [],
    ["x"],
    ["x" * 40],
    ["x" * 41],
    [""],
    ["x"] * 16,
    ["x"] * 17,
    ["top_k", "top_p"],
    ["top_k", "top_k"],
    ["top_k"] * 33,
)
PROBES = (
    -3,
    -2,
    -1,
    -0.1,
    0,
    0.005,
    0.5,
    0.995,
    1,
    2,
    2.1,
    10,
    10.1,
    100,
    100.1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    10**12,
)


def taken_by_a_catalog(name: str, value: float | list[str]) -> bool:
    try:
        msgspec.convert({name: value}, DefaultSampling)
    except msgspec.ValidationError:
        return False
    return True


def taken_from_a_caller(name: str, value: float | list[str]) -> bool:
    body: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    try:
        read_chat(json.dumps({**body, name: value}).encode())
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("name", NUMBERS)
def test_the_bounds_are_those_of_a_request(name: str) -> None:
    catalog = [value for value in PROBES if taken_by_a_catalog(name, value)]
    assert catalog == [value for value in PROBES if taken_from_a_caller(name, value)]
    assert 0 < len(catalog) < len(PROBES)


@pytest.mark.parametrize("name", LISTS)
def test_lists_have_the_same_bounds_as_well(name: str) -> None:
    catalog = [value for value in LIST_PROBES if taken_by_a_catalog(name, value)]
    assert catalog == [value for value in LIST_PROBES if taken_from_a_caller(name, value)]
    assert 0 < len(catalog) < len(LIST_PROBES)


def test_each_parameter_reaches_the_engine() -> None:
    named = [field.name for field in msgspec.structs.fields(Sampling)]
    assert named == [*NAMES[:-1], "logit_bias", NAMES[-1]], "a bias by token is a call's own"
    values: dict[str, Any] = {**dict.fromkeys(NUMBERS, 1), "dry_sequence_breakers": ("x",), "samplers": ("top_k",)}
    assert DefaultSampling(**values).sampling() == Sampling(**values)
    assert DefaultSampling(top_k=5, seed=-1).sampling() == Sampling(top_k=5)
