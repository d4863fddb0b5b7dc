"""Names to models."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.call import Principal
from gateway.catalog.names import Names
from gateway.errors import InvalidRequest, ModelNotFound, PermissionDenied
from workers.protocol.catalog import Catalog, ModelSpec

EVERYONE = Principal("k", "t", None, False)
NARROW = Principal("k", "t", frozenset({"chat"}), False)
CATALOG = Catalog(models=(ModelSpec(name="llama", path=str(Path("x.gguf"))),), aliases={"chat": "llama"})


def test_aliases_models_and_the_fleet_are_names() -> None:
    names = Names(CATALOG)
    assert names.resolve("chat", EVERYONE, ()) == "llama"
    assert names.resolve("llama", EVERYONE, ()) == "llama"
    assert names.resolve("guest", EVERYONE, ("guest",)) == "guest"
    assert names.permitted(EVERYONE, ("guest",)) == {"chat": "llama", "guest": "guest", "llama": "llama"}


def test_without_a_catalog_the_fleet_is_all() -> None:
    assert Names(None).resolve("m", EVERYONE, ("m",)) == "m"


def test_an_unknown_name_tells_the_known_ones() -> None:
    with pytest.raises(ModelNotFound, match=r"`gpt` does not exist. Use one of: chat, guest, llama") as caught:
        Names(CATALOG).resolve("gpt", EVERYONE, ("guest",))
    assert (caught.value.status, caught.value.param) == (404, "model")


def test_only_names_that_the_key_may_use_are_told() -> None:
    names = Names(CATALOG)
    assert names.resolve("chat", NARROW, ()) == "llama"
    assert names.permitted(NARROW, ("guest",)) == {"chat": "llama"}
    with pytest.raises(PermissionDenied, match="Use one of: chat\\."):
        names.resolve("llama", NARROW, ())
    with pytest.raises(ModelNotFound, match="Use one of: chat\\."):
        names.resolve("gpt", NARROW, ())


def test_the_list_in_a_message_is_bounded() -> None:
    fleet = [f"m{n:03}" for n in range(50)]
    with pytest.raises(ModelNotFound, match="and 30 more") as caught:
        Names(None).resolve("x" * 10_000, EVERYONE, fleet)
    assert len(caught.value.message) < 500


def test_nothing_to_use_says_what_to_do() -> None:
    with pytest.raises(ModelNotFound, match="start a worker"):
        Names(None).resolve("m", EVERYONE, ())


def test_without_a_name_it_is_the_only_model_or_the_only_one_that_is_served() -> None:
    assert Names(None).resolve("", EVERYONE, ("m",)) == "m"
    assert Names(CATALOG).resolve("", EVERYONE, ("guest",), served=("guest",)) == "guest"
    for served in ((), ("guest", "llama")):
        with pytest.raises(InvalidRequest, match=r"`model` is missing\. Use one of: chat, guest, llama"):
            Names(CATALOG).resolve("", EVERYONE, ("guest",), served=served)
