from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.cache.prompt import Scope, StateNames, block_names, chain
from workers.engine.disk.sealed import NAME_HEX, CacheKeys

KEYS = CacheKeys("secret")
text = st.text(max_size=6)
scopes = st.builds(Scope, st.none() | text, text, st.binary(max_size=4))
tokens = st.lists(st.integers(0, 3), max_size=12).map(lambda values: np.array(values, dtype=np.int32))


@given(scopes, scopes)
def test_scopes_that_differ_have_other_seeds(one: Scope, other: Scope) -> None:
    assert (one.seed == other.seed) == (one == other)


@given(tokens, tokens, st.integers(1, 4))
@settings(max_examples=300)
def test_digests_are_equal_as_far_as_the_tokens_are(one: np.ndarray, other: np.ndarray, block: int) -> None:
    mine, theirs = chain(b"s" * 32, one, block), chain(b"s" * 32, other, block)
    assert (len(mine), len(theirs)) == (len(one) // block, len(other) // block)
    for number, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        end = (number + 1) * block
        assert (a == b) == (one[:end].tolist() == other[:end].tolist())
    assert not set(mine) & set(chain(b"t" * 32, one, block))
    assert len(set(mine)) == len(mine)


def test_public_blocks_are_everybodys_and_what_follows_is_not() -> None:
    line = np.arange(64 * 5, dtype=np.int32)
    blue, red = block_names(line, Scope("blue"), 130), block_names(line, Scope("red"), 130)
    assert [name.tenant for name in blue] == [None, None, "blue", "blue", "blue"]
    assert blue[:2] == red[:2]
    assert not {name.digest for name in blue[2:]} & {name.digest for name in red[2:]}
    assert [(name.start, name.end) for name in blue[:2]] == [(0, 64), (64, 128)]
    alone = block_names(line, Scope("blue"))
    assert {name.tenant for name in alone} == {"blue"}
    assert not {name.digest for name in alone} & {name.digest for name in red}


teams = st.builds(Scope, text, text, st.binary(max_size=4))
lines = st.lists(st.integers(0, 1), max_size=3).map(
    lambda values: np.repeat(np.array(values, dtype=np.int32), 50)  # blocks end within these runs
)


@given(lines, lines, teams, teams, st.integers(0, 150), st.integers(0, 150))
@settings(max_examples=300)
def test_states_have_one_name_if_tokens_and_owner_are_the_same(
    one: np.ndarray, other: np.ndarray, mine: Scope, theirs: Scope, my_public: int, their_public: int
) -> None:
    names, others = StateNames(one, mine, my_public), StateNames(other, theirs, their_public)
    for end in range(1, min(len(one), len(other)) + 1, 7):
        both = ((mine, my_public), (theirs, their_public))
        owners = [scope.public if end <= public else scope for scope, public in both]
        # Where everybody's tokens end within whole blocks counts too: those are named as everybody's.
        open_blocks = [min(end, public) // 64 for public in (my_public, their_public)]
        same = owners[0] == owners[1] and open_blocks[0] == open_blocks[1]
        same = same and one[:end].tolist() == other[:end].tolist()
        assert (names.name(end) == others.name(end)) == same


def test_states_that_end_in_one_block_are_found_by_its_stem() -> None:
    line = np.arange(300, dtype=np.int32)
    names = StateNames(line, Scope("blue"), 130)
    stems = {end: names.stem(end) for end in range(1, 301)}
    for end, (tenant, stem) in stems.items():
        name = names.name(end)
        assert (name.tenant, name.stem, name.start, name.end) == (tenant, stem, 0, end)
        assert tenant == (None if end <= 130 else "blue")
        assert all((stems[o] == stems[end]) == (o // 64 == end // 64 and (o <= 130) == (end <= 130)) for o in stems)
    states, blocks = map(names.name, stems), block_names(line, Scope("blue"))
    assert not {name.digest for name in states} & {name.digest for name in blocks}


def test_stems_are_masked_in_file_names() -> None:
    names = StateNames(np.arange(300, dtype=np.int32), Scope("blue"))
    files = [KEYS.file_name(b"f" * 32, name.digest, name.stem) for name in map(names.name, range(256, 301))]
    assert len({file[:NAME_HEX] for file in files}) == len({file[NAME_HEX:] for file in files}) == len(files)
    mark = KEYS.stem_mark(b"f" * 32, names.stem(256)[1])
    assert {KEYS.mark_of(file) for file in files} == {mark}
    assert {CacheKeys("another").mark_of(file) for file in files} != {mark}
    assert KEYS.stem_mark(b"g" * 32, names.stem(256)[1]) != mark


def test_a_view_of_tokens_is_the_same_tokens() -> None:
    column = np.arange(64 * 4, dtype=np.int32).reshape(-1, 2)[:, 1]
    assert not column.flags.c_contiguous
    assert chain(b"s" * 32, column) == chain(b"s" * 32, column.copy())


def test_names_tell_nothing_without_the_secret() -> None:
    other = CacheKeys("another")
    assert KEYS.tenant_folder("blue") == CacheKeys("secret").tenant_folder("blue")
    folders = {KEYS.tenant_folder(name) for name in ("blue", "red", "", "public", None)}
    assert len(folders) == 5
    assert other.tenant_folder("blue") not in folders
    assert KEYS.file_name(b"f" * 32, b"d" * 32) != other.file_name(b"f" * 32, b"d" * 32)
    assert KEYS.file_name(b"f" * 32, b"d" * 32) != KEYS.file_name(b"g" * 32, b"d" * 32)
    assert KEYS.seal != other.seal
    with pytest.raises(ValueError, match="empty"):
        CacheKeys("")


def test_naming_a_prompt_of_16k_tokens_is_quick() -> None:
    line = np.random.default_rng(1).integers(0, 150_000, 16_384, dtype=np.int32)
    best = min(_seconds(line) for _ in range(5))
    assert best < 0.005, f"{best * 1e3:.2f} ms"


def _seconds(line: np.ndarray) -> float:
    started = time.perf_counter()
    assert len(block_names(line, Scope("blue"))) == 256
    return time.perf_counter() - started
