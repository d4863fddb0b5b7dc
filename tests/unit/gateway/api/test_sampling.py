"""Sampling parameters at the door: llama-server's names and forms, our bounds and words."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.api.openai.requests import read_chat
from gateway.api.parameters.sampling import INITIALS, NAMES
from gateway.errors import InvalidRequest
from workers.protocol.requests import GenerateRequest, Sampling


def read(**parameters: Any) -> GenerateRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **parameters}
    return read_chat(json.dumps(body).encode()).requests[0]


EVERY = {
    "temperature": 0.5,
    "dynatemp_range": 0.25,
    "dynatemp_exponent": 2.0,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.01,
    "typical_p": 0.75,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "repeat_penalty": 1.1,
    "repeat_last_n": -1,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", "---"],
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "adaptive_target": 0.5,
    "adaptive_decay": 0.8,
    "min_keep": 2,
    "samplers": ["top_k", "temperature"],
    "logit_bias": [[5, 1.5], ["cat", -2.0], [6, None]],
    "seed": 2**32 - 1,
}


def test_every_sampling_parameter_arrives() -> None:
    assert set(EVERY) == set(Sampling.__struct_fields__)
    asked = read(**{**EVERY, "logit_bias": [[5, 1.5], ["cat", -2], [6, False]]})
    assert msgspec.to_builtins(asked.sampling) == {
        **EVERY,
        "samplers": ("top_k", "temperature"),
        "dry_sequence_breakers": ("\n", "---"),
        "logit_bias": ((5, 1.5), ("cat", -2.0), (6, None)),
    }


def test_the_request_as_a_worker_reads_it() -> None:
    asked = read(**{**EVERY, "logit_bias": {"5": 1.5, "cat": False}}, cache_salt="s", priority=3, n_keep=-1)
    assert msgspec.json.decode(msgspec.json.encode(asked), type=GenerateRequest) == asked


def test_what_is_not_sampling_arrives_as_well() -> None:
    asked = read(special=True, cache_prompt=False, cache_salt="mine", priority=-5, context_shift=True, n_keep=9)
    assert (asked.special, asked.cache_prompt, asked.cache_salt) == (True, False, "mine")
    assert (asked.priority, asked.context_shift, asked.n_keep) == (5, True, 9)
    assert read(id_slot=2, t_max_predict_ms=70) == msgspec.structs.replace(read(), slot=2, max_predict_ms=70)
    assert read(cache_prompt=True) == read()


@pytest.mark.parametrize(
    ("parameters", "n_probs"),
    [
        ({}, 0),
        ({"logprobs": False, "top_logprobs": 0}, 0),
        ({"logprobs": True}, -1),
        ({"logprobs": True, "top_logprobs": 0}, -1),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"n_probs": 100}, 100),
        ({"logprobs": True, "n_probs": 3}, 3),
    ],
)
def test_how_many_probabilities_are_wanted(parameters: dict[str, Any], n_probs: int) -> None:
    assert read(**parameters).n_probs == n_probs


@pytest.mark.parametrize(
    ("bias", "read_as"),
    [
        ({"5": 100, "007": -100}, ((5, 100.0), (7, -100.0))),
        ({"5": False, " cat": 1}, ((5, None), (" cat", 1.0))),
        ([[5, 1], ["5", 2], ["x", False]], ((5, 1.0), ("5", 2.0), ("x", None))),
        ([[5, 5e-324], [6, -1e-290], [7, 1e-45]], ((5, 0.0), (6, 0.0), (7, 1e-45))),
        ({}, None),
        ([], None),
    ],
)
def test_forms_of_a_bias(bias: Any, read_as: Any) -> None:
    assert read(logit_bias=bias).sampling.logit_bias == read_as


def test_sampler_names_as_llama_server_takes_them() -> None:
    assert read(samplers="edskypmxt").sampling.samplers == NAMES[:9]
    assert read(samplers=list(NAMES)).sampling.samplers == NAMES
    others = ["top-k", "nucleus", "temp", "typ", "minp", "top-n-sigma", "adaptive-p"]
    assert read(samplers=others).sampling.samplers == (
        *("top_k", "top_p", "temperature", "typ_p", "min_p", "top_n_sigma", "adaptive_p"),
    )
    assert read(samplers=["TopK", "typ-p"]).sampling.samplers == ("top_k", "typ_p")
    assert read(samplers=[]).sampling.samplers == ()
    assert set(INITIALS.values()) == set(NAMES)


@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        ({"samplers": ["top_k", "best"]}, "samplers.1", "'best', which is no sampler. Send some of: penalties, dry"),
        ({"samplers": "kz"}, "samplers", "'z', which is no sampler. Send some of: e, d, s"),
        ({"samplers": ["top_k"] * 33}, "samplers", "at most 32"),
        ({"samplers": 3}, "samplers", "string"),
        ({"samplers": ["top_k", "typ_p", "typical"]}, "samplers.2", "no sampler"),
        ({"samplers": ["typ_p", "top_k", "typ-p"]}, "samplers.2", "names typ_p a second time. Name each sampler once."),
        ({"samplers": "yky"}, "samplers", "names typ_p a second time"),
        (
            {"logit_bias": {f"{n:04}" + "x" * 100: 1 for n in range(158)}},
            "logit_bias",
            "texts of 16432 characters. Send at most 16384 in all.",
        ),
        ({"logit_bias": 3}, "logit_bias", "Send an object."),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "is 'x'. Send a number from -100 to 100, or false"),
        ({"logit_bias": {"5": True}}, "logit_bias.5", "is true"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "is 101"),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias.9999999999", "is for 9999999999"),
        ({"logit_bias": {"": 1}}, "logit_bias.", "1 to 512 characters"),
        ({"logit_bias": [[5, 1], 6]}, "logit_bias.1", "is 6. Send a pair"),
        ({"logit_bias": [[-1, 1]]}, "logit_bias.0", "is for -1"),
        ({"logit_bias": [[None, 1]]}, "logit_bias.0", "is for null"),
        ({"logit_bias": [[1, 1]] * 1025}, "logit_bias", "has 1025 items. Send at most 1024."),
        ({"logprobs": 5}, "logprobs", "true or false"),
        ({"top_logprobs": 3}, "top_logprobs", "needs `logprobs: true`"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"n_probs": 101}, "n_probs", "at most 100"),
        ({"dry_sequence_breakers": []}, "dry_sequence_breakers", "at least 1"),
        (
            {"dry_sequence_breakers": [f"{n}" + "e" * 38 for n in range(4)]},
            "dry_sequence_breakers",
            "have 156 characters. Send at most 128 in all.",
        ),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers.0", "at least 1"),
        ({"mirostat": 3}, "mirostat", "at most 2"),
        ({"priority": 101}, "priority", "at most 100"),
        ({"n_keep": -2}, "n_keep", "at least -1"),
        ({"cache_salt": "x" * 257}, "cache_salt", "at most 256"),
    ],
)
def test_wrong_values_are_named_by_their_path(parameters: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**parameters)
    assert caught.value.param == param
    assert words in caught.value.message
