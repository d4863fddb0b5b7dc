"""Names to models."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.back_pressure import retry_after
from gateway.call import Principal
from gateway.catalog.names import ModelNames
from gateway.errors import ModelNotFound, PermissionDenied, Unavailable
from workers.models.catalog import AliasChain, Catalog, Target
from workers.models.spec import ModelSpec

EVERYONE = Principal("k", "t", None, False)
NARROW = Principal("k", "t", frozenset({"chat"}), False)
CATALOG = Catalog(models=(ModelSpec(name="llama", path=str(Path("x.gguf"))),), aliases={"chat": "llama"})


def test_aliases_models_and_the_fleet_are_names() -> None:
    names = ModelNames(CATALOG)
    assert names.resolve("chat", EVERYONE, ()) == "llama"
    assert names.resolve("llama", EVERYONE, ()) == "llama"
    assert names.resolve("guest", EVERYONE, ("guest",)) == "guest"
    assert names.permitted(EVERYONE, ("guest",)) == {"chat": "llama", "guest": "guest", "llama": "llama"}


def test_without_a_catalog_the_fleet_is_all() -> None:
    assert ModelNames(None).resolve("m", EVERYONE, ("m",)) == "m"


def test_an_unknown_name_tells_the_known_ones() -> None:
    with pytest.raises(ModelNotFound, match=r"`gpt` does not exist. Use one of: chat, guest, llama") as caught:
        ModelNames(CATALOG).resolve("gpt", EVERYONE, ("guest",))
    assert (caught.value.status, caught.value.param) == (404, "model")


def test_what_may_be_served_by_a_fleet_that_was_not_read_yet_is_not_unknown() -> None:
    names = ModelNames(CATALOG)
    assert names.resolve("chat", EVERYONE, (), complete=False) == "llama"
    with pytest.raises(Unavailable, match="has not read yet") as caught:
        names.resolve("gpt", EVERYONE, (), complete=False)
    assert (caught.value.status, retry_after(caught.value)) == (503, 1)


def test_only_names_that_the_key_may_use_are_told() -> None:
    names = ModelNames(CATALOG)
    assert names.resolve("chat", NARROW, ()) == "llama"
    assert names.permitted(NARROW, ("guest",)) == {"chat": "llama"}
    with pytest.raises(PermissionDenied, match="Use one of: chat\\."):
        names.resolve("llama", NARROW, ())
    with pytest.raises(ModelNotFound, match="Use one of: chat\\."):
        names.resolve("gpt", NARROW, ())


def test_the_list_in_a_message_is_bounded() -> None:
    fleet = [f"m{n:03}" for n in range(50)]
    with pytest.raises(ModelNotFound, match="and 30 more") as caught:
        ModelNames(None).resolve("x" * 10_000, EVERYONE, fleet)
    assert len(caught.value.message) < 500


def test_nothing_to_use_says_what_to_do() -> None:
    with pytest.raises(ModelNotFound, match="start a worker"):
        ModelNames(None).resolve("m", EVERYONE, ())


CHAINS = Catalog(
    models=tuple(ModelSpec(name=name, path="x.gguf") for name in ("big", "next", "small", "tiny")),
    aliases={
        "fast": AliasChain(
            targets=(Target(model="next", weight=1), Target(model="big", weight=9)), fallbacks=("low", "big")
        ),
        "low": AliasChain(targets=("small",), fallbacks=("plain",)),
        "plain": "tiny",
    },
)


def test_a_name_of_several_models_leads_to_the_heaviest() -> None:
    names = ModelNames(CHAINS)
    assert names.resolve("fast", EVERYONE, ()) == "big"
    assert names.all(()) == {
        "big": "big",
        "fast": "big",
        "low": "small",
        "next": "next",
        "plain": "tiny",
        "small": "small",
        "tiny": "tiny",
    }
    assert [name for name in names.all(()) if names.is_chain(name)] == ["fast", "low"]


def test_a_chain_is_the_targets_and_what_stands_in_for_them_each_once() -> None:
    names = ModelNames(CHAINS)
    assert names.chain("fast", "") == ("big", "next", "small", "tiny")
    assert {names.chain("fast", str(number)) for number in range(50)} == {
        ("big", "next", "small", "tiny"),
        ("next", "big", "small", "tiny"),
    }
    assert names.chain("low", "any") == ("small", "tiny")


def test_a_key_for_a_name_is_a_key_for_its_chain_only_by_that_name() -> None:
    names = ModelNames(CHAINS)
    narrow = Principal("k", "t", frozenset({"fast"}), False)
    assert names.resolve("fast", narrow, ()) == "big"
    with pytest.raises(PermissionDenied, match="Use one of: fast"):
        names.resolve("small", narrow, ())
