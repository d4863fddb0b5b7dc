"""Saved states that are damaged, another model's or forged: what llama.cpp notices, and what it does not."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.integration.engine.conftest import ROOT
from tests.support.lone_context import lone_context
from tests.support.small_models import SMALL_MODELS, WORDS
from workers.llama.native import StateUnusable
from workers.models.spec import LlamaSettings

TEXT, OTHER = WORDS, WORDS[::-1]


@pytest.mark.parametrize("name", ["attention", "attention-mrope", "window", "recurrent", "hybrid"])
def test_a_damaged_state_is_refused(name: str, small_models: dict[str, Path]) -> None:
    with lone_context(small_models[name], kv_tokens=256) as lone:
        memory = lone.memory
        lone.feed(0, TEXT[:20])
        lone.feed(1, OTHER[:10])
        state, neighbour = memory.save(0), memory.save(1)
        cut = [state[:length] for length in (0, 1, 4, 8, 12, 16, 20, 40, len(state) // 2, len(state) - 1)]
        counts = [state[:8] + struct.pack("<I", number) + state[12:] for number in (0, 2, 5000, 0xFFFFFFFF)]
        for damaged in [*cut, *counts, state + b"more", bytes(len(state)), b"\xff" * len(state)]:
            with pytest.raises(StateUnusable, match=r"could not restore a saved state: \S"):
                memory.load(2, damaged)
            assert lone.positions(2) == (-1, -1)
        assert memory.save(1) == neighbour
        memory.load(2, state)
        assert memory.can_continue(2, 20)


def test_a_state_of_another_model_is_refused(small_models: dict[str, Path]) -> None:
    states = {}
    for name in SMALL_MODELS:
        with lone_context(small_models[name]) as lone:
            lone.feed(0, TEXT[:20])
            states[name] = lone.memory.save(0)
    twins = {"attention", "attention-scaled", "attention-alibi", "attention-learned"}
    for name in ("attention", "recurrent", "hybrid", "window"):
        with lone_context(small_models[name]) as lone:
            for other, state in states.items():
                if other == name or {name, other} <= twins:
                    continue
                with pytest.raises(StateUnusable):
                    lone.memory.load(1, state)


def test_positions_and_values_of_a_state_are_not_checked(small_models: dict[str, Path]) -> None:
    """So only states that are known to be ours are handed over, and `can_continue` is asked."""
    with lone_context(small_models["attention"]) as lone:
        lone.feed(0, TEXT[:20])
        state = lone.memory.save(0)
        for position in (-5, 5000):
            lone.memory.load(1, state[:16] + struct.pack("<i", position) + state[20:])
            assert not lone.memory.can_continue(1, 20)
            lone.memory.clear()


FORGED = """
import struct, sys
from pathlib import Path
from tests.support.lone_context import lone_context

with lone_context(Path(sys.argv[1])) as lone:
    lone.feed(0, list(range(10, 30)))
    state = lone.memory.save(0)
    cell = state[12:20]
    print("loading", flush=True)
    lone.memory.load(1, state[:8] + struct.pack("<I", 2) + cell + cell + state[20:])
"""


def test_a_forged_state_can_end_the_process(small_models: dict[str, Path]) -> None:
    """Two cells of one recurrent sequence: llama.cpp asserts. A checksum would not stop it, a signature does."""
    child = subprocess.run(
        [sys.executable, "-c", FORGED, small_models["recurrent"]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )
    assert child.stdout == "loading\n"
    assert child.returncode < 0, child.stderr


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_a_value_that_is_no_number_spreads_without_flash_attention(
    flash_attn: str, small_models: dict[str, Path]
) -> None:
    """To every sequence, and on after its owner is gone, until the cell is written again."""
    settings = LlamaSettings(n_threads=1, flash_attn=flash_attn)
    with lone_context(small_models["attention"], kv_tokens=256, llama=settings) as lone:
        memory = lone.memory
        lone.feed(0, TEXT[:20])
        lone.feed(1, OTHER[:20])
        state = memory.save(0)
        first_key = 16 + 20 * 12 + 8 + 12
        memory.load(2, state[:first_key] + np.float16("nan").tobytes() + state[first_key + 2 :])
        assert np.isnan(lone.step((2, 9, 20))[0]).all()
        spread = flash_attn == "off"
        assert np.isnan(lone.step((1, 9, 20))[0]).any() == spread
        memory.remove(2)
        assert np.isnan(lone.step((1, 9, 21))[0]).any() == spread
