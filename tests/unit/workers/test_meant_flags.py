"""What an argument that is no setting may have meant."""

from __future__ import annotations

import msgspec
import pytest

from gateway.settings import UpSettings
from workers.commands.meant_flags import OF_LLAMA_CPP, OF_LLAMA_SERVER, hint
from workers.models.spec import LlamaSettings

SETTINGS = frozenset(UpSettings.model_fields)


def test_flags_of_llama_server_lead_to_settings_that_there_are() -> None:
    assert set(OF_LLAMA_SERVER.values()) <= SETTINGS
    assert set(OF_LLAMA_CPP.values()) <= {field.name for field in msgspec.structs.fields(LlamaSettings)}
    assert not OF_LLAMA_SERVER.keys() & OF_LLAMA_CPP.keys()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--ctx 5 --prot 9", " (did you mean --port?)"),
        ("-t", """ (did you mean --llama '{"n_threads": ...}'?)"""),
        ("-t --port 9", """ (did you mean --llama '{"n_threads": ...}'?)"""),
        ("-ctk q8_0", """ (did you mean --llama '{"cache_type_k": "q8_0"}'?)"""),
        ("--threads=4", """ (did you mean --llama '{"n_threads": 4}'?)"""),
        ("--tags x", " (it is a field of a model in a catalog: give --catalog FILE, see docs/catalog.md)"),
        ("--callrs 3", " (did you mean --callers?)"),
        ("models.yaml", " (did you mean --catalog models.yaml?)"),
        ("--zzz", ""),
        ("", ""),
    ],
)
def test_what_was_meant(words: str, told: str) -> None:
    assert hint(words.split(), SETTINGS, {"tags"}, ["--callers"]) == told


def test_a_command_without_models_is_told_of_none() -> None:
    assert hint(["-ngl", "9"], {"port"}, {"tags"}, ()) == ""
    assert hint(["-c", "9"], {"port"}, (), ()) == ""
    assert hint(["x.gguf"], {"port"}, (), ()) == ""
