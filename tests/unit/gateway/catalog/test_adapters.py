"""Adapters by name, by number, and called as a model."""

from __future__ import annotations

import pytest

from gateway.adapters.choice import resolve_uses
from gateway.call import Principal
from gateway.catalog.names import ModelNames
from gateway.errors import InvalidRequest, ModelNotFound, PermissionDenied
from workers.protocol.requests import AdapterUse

KNOWN = ["pirate", "poet"]
EVERYONE = Principal("k", "t", None, False)
ADAPTERS = {"pirate": "llama", "poet": "llama"}


def test_a_call_that_names_nothing_uses_the_scales_of_the_model() -> None:
    assert resolve_uses((), "", {}, KNOWN, EVERYONE) == ()
    assert resolve_uses((), "", {"poet": 0.5, "gone": 1.0, "pirate": 0.0}, KNOWN, EVERYONE) == (
        AdapterUse("poet", 0.5),
    )


def test_what_is_asked_for_stands_alone() -> None:
    asked = (AdapterUse("pirate", 0.25),)
    assert resolve_uses(asked, "", {"poet": 0.5}, KNOWN, EVERYONE) == asked


def test_numbers_are_places_in_the_list_unless_an_adapter_has_that_name() -> None:
    assert resolve_uses((AdapterUse("1", 2.0),), "", {}, KNOWN, EVERYONE) == (AdapterUse("poet", 2.0),)
    assert resolve_uses((AdapterUse("1"),), "", {}, ["0", "1"], EVERYONE) == (AdapterUse("1"),)


def test_a_called_adapter_acts_in_full_unless_its_scale_is_asked_for() -> None:
    assert resolve_uses((), "poet", {"pirate": 1.0}, KNOWN, EVERYONE) == (AdapterUse("poet"),)
    pirate = AdapterUse("pirate", 0.5)
    assert resolve_uses((pirate,), "poet", {}, KNOWN, EVERYONE) == (AdapterUse("poet"), pirate)
    assert resolve_uses((AdapterUse("poet", 0.5),), "poet", {}, KNOWN, EVERYONE) == (AdapterUse("poet", 0.5),)


@pytest.mark.parametrize("wanted", ["parrot", "2", "-1", "²", "9" * 30])
def test_an_unknown_adapter_tells_the_known_ones(wanted: str) -> None:
    with pytest.raises(InvalidRequest, match="`pirate`, `poet`") as caught:
        resolve_uses((AdapterUse(wanted),), "", {}, KNOWN, EVERYONE)
    assert caught.value.param == "lora"


def test_an_adapter_is_a_name_of_its_model() -> None:
    names = ModelNames(None)
    assert names.resolve("pirate", EVERYONE, ("llama",), ADAPTERS) == "llama"
    assert names.is_adapter("pirate", ("llama",), ADAPTERS)
    assert names.permitted(EVERYONE, ("llama",), ADAPTERS) == {"llama": "llama", **ADAPTERS}
    assert names.resolve_call("", EVERYONE, ("llama",), ADAPTERS).model == "llama"


def test_a_model_goes_before_an_adapter_of_its_name() -> None:
    names = ModelNames(None)
    adapters = {"qwen": "llama"}
    assert names.resolve("qwen", EVERYONE, ("llama", "qwen"), adapters) == "qwen"
    assert not names.is_adapter("qwen", ("llama", "qwen"), adapters)


OF_MODEL = Principal("k", "t", frozenset({"llama"}), False)
OF_ONE = Principal("k", "t", frozenset({"llama", "pirate"}), False)


def test_a_key_for_the_model_does_not_open_its_adapters() -> None:
    names = ModelNames(None)
    assert names.permitted(OF_MODEL, ("llama",), ADAPTERS) == {"llama": "llama"}
    assert names.permitted(OF_ONE, ("llama",), ADAPTERS) == {"llama": "llama", "pirate": "llama"}
    for principal, told in ((OF_MODEL, "llama"), (OF_ONE, "llama, pirate")):
        with pytest.raises(PermissionDenied, match=rf"Use one of: {told}\."):
            names.resolve("poet", principal, ("llama",), ADAPTERS)
        with pytest.raises(ModelNotFound, match=rf"Use one of: {told}\."):
            names.resolve("parrot", principal, ("llama",), ADAPTERS)
    assert names.resolve("pirate", OF_ONE, ("llama",), ADAPTERS) == "llama"


def test_a_key_for_an_adapter_does_not_open_the_model() -> None:
    names, of_adapter = ModelNames(None), Principal("k", "t", frozenset({"pirate"}), False)
    assert names.resolve("pirate", of_adapter, ("llama",), ADAPTERS) == "llama"
    with pytest.raises(PermissionDenied):
        names.resolve("llama", of_adapter, ("llama",), ADAPTERS)
    with pytest.raises(ModelNotFound, match="`model` is missing"):
        names.resolve_call("", of_adapter, ("llama",), ADAPTERS)


@pytest.mark.parametrize("wanted", ["poet", "1"])
def test_an_adapter_that_the_key_may_not_use_is_refused_by_name_and_number(wanted: str) -> None:
    with pytest.raises(PermissionDenied, match=f"may not use the adapter '{wanted}'. There are: `pirate`") as caught:
        resolve_uses((AdapterUse(wanted),), "", {}, KNOWN, OF_ONE)
    assert caught.value.param == "lora"
    assert "poet" not in caught.value.message.replace(f"'{wanted}'", "")
    with pytest.raises(PermissionDenied, match="none that this key may use"):
        resolve_uses((AdapterUse(wanted),), "", {}, KNOWN, OF_MODEL)
    with pytest.raises(InvalidRequest) as caught_unknown:
        resolve_uses((AdapterUse("parrot"),), "", {}, KNOWN, OF_ONE)
    assert "poet" not in caught_unknown.value.message


def test_any_key_may_use_what_is_its_own_and_turn_off_what_is_not() -> None:
    uses = (AdapterUse("pirate", 0.5), AdapterUse("1", 0.0))
    assert resolve_uses(uses, "", {}, KNOWN, OF_ONE) == (AdapterUse("pirate", 0.5), AdapterUse("poet", 0.0))


def test_default_scales_are_the_operators_word_for_every_key() -> None:
    assert resolve_uses((), "", {"poet": 0.5}, KNOWN, OF_MODEL) == (AdapterUse("poet", 0.5),)
