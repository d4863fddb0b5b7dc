"""Adapters by name, by number, and called as a model."""

from __future__ import annotations

import pytest

from gateway.call import Principal
from gateway.catalog.adapters import uses_of
from gateway.catalog.names import Names
from gateway.errors import InvalidRequest, ModelNotFound, PermissionDenied
from workers.protocol.requests import AdapterUse

KNOWN = ["pirate", "poet"]
EVERYONE = Principal("k", "t", None, False)
ADAPTERS = {"pirate": "llama", "poet": "llama"}


def test_a_call_that_names_nothing_uses_the_scales_of_the_model() -> None:
    assert uses_of((), "", {}, KNOWN) == ()
    assert uses_of((), "", {"poet": 0.5, "gone": 1.0, "pirate": 0.0}, KNOWN) == (AdapterUse("poet", 0.5),)


def test_what_is_asked_for_stands_alone() -> None:
    asked = (AdapterUse("pirate", 0.25),)
    assert uses_of(asked, "", {"poet": 0.5}, KNOWN) == asked


def test_numbers_are_places_in_the_list_unless_an_adapter_has_that_name() -> None:
    assert uses_of((AdapterUse("1", 2.0),), "", {}, KNOWN) == (AdapterUse("poet", 2.0),)
    assert uses_of((AdapterUse("1"),), "", {}, ["0", "1"]) == (AdapterUse("1"),)


def test_a_called_adapter_acts_in_full_unless_its_scale_is_asked_for() -> None:
    assert uses_of((), "poet", {"pirate": 1.0}, KNOWN) == (AdapterUse("poet"),)
    pirate = AdapterUse("pirate", 0.5)
    assert uses_of((pirate,), "poet", {}, KNOWN) == (AdapterUse("poet"), pirate)
    assert uses_of((AdapterUse("poet", 0.5),), "poet", {}, KNOWN) == (AdapterUse("poet", 0.5),)


@pytest.mark.parametrize("wanted", ["parrot", "2", "-1", "²", "9" * 30])
def test_an_unknown_adapter_tells_the_known_ones(wanted: str) -> None:
    with pytest.raises(InvalidRequest, match="`pirate`, `poet`") as caught:
        uses_of((AdapterUse(wanted),), "", {}, KNOWN)
    assert caught.value.param == "lora"


def test_an_adapter_is_a_name_of_its_model() -> None:
    names = Names(None)
    assert names.resolve("pirate", EVERYONE, ("llama",), ADAPTERS) == "llama"
    assert names.is_adapter("pirate", ("llama",), ADAPTERS)
    assert names.permitted(EVERYONE, ("llama",), ADAPTERS) == {"llama": "llama", **ADAPTERS}
    assert names.resolve("", EVERYONE, ("llama",), ADAPTERS) == "llama"


def test_a_model_goes_before_an_adapter_of_its_name() -> None:
    names = Names(None)
    adapters = {"qwen": "llama"}
    assert names.resolve("qwen", EVERYONE, ("llama", "qwen"), adapters) == "qwen"
    assert not names.is_adapter("qwen", ("llama", "qwen"), adapters)


def test_who_may_use_a_model_may_use_its_adapters() -> None:
    names = Names(None)
    of_model = Principal("k", "t", frozenset({"llama"}), False)
    of_adapter = Principal("k", "t", frozenset({"pirate"}), False)
    assert names.resolve("poet", of_model, ("llama",), ADAPTERS) == "llama"
    assert names.resolve("pirate", of_adapter, ("llama",), ADAPTERS) == "llama"
    with pytest.raises(PermissionDenied, match=r"Use one of: pirate\."):
        names.resolve("poet", of_adapter, ("llama",), ADAPTERS)
    with pytest.raises(ModelNotFound, match=r"Use one of: pirate\."):
        names.resolve("parrot", of_adapter, ("llama",), ADAPTERS)
