"""The radix index against the simplest thing that does the same: a list of who holds what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.engine.cache.cached_sequence import Checkpoint, Restore
from workers.engine.cache.prefix_index import PrefixIndex
from workers.engine.cache.prefix_tree import Block, is_fork
from workers.engine.cache.prompt import Path, Scope, Tokens, common

RED, BLUE = Scope("red"), Scope("blue")
BLOCK = 4


def path(*tokens: int, scope: Scope = RED, num_public: int = 0) -> Path:
    return Path(np.array(tokens, np.int32), scope, num_public)


def filled(index: PrefixIndex, sequence: int, what: Path) -> None:
    assert index.extend(sequence, what, len(what.tokens)) == len(what.tokens)


def test_the_longest_prefix_is_found_inside_a_run() -> None:
    index = PrefixIndex()
    filled(index, 1, path(1, 2, 3, 4, 5))
    match = index.match(path(1, 2, 3, 9, 9), 5)
    assert (match.num_held, match.holder) == (3, 1)
    assert index.match(path(1, 2, 3, 4, 5, 6), 2).num_held == 2
    assert index.match(path(9), 1).num_held == 0


def test_shared_cells_count_once_and_are_free_with_their_last_holder() -> None:
    index = PrefixIndex()
    filled(index, 1, path(1, 2, 3, 4))
    index.share(2, path(1, 2, 3, 7), 3)
    filled(index, 2, path(1, 2, 3, 7))
    assert index.num_cells == 5
    assert index.release(1) == 1
    assert index.release(2) == 4
    assert index.num_cells == 0
    assert not index.root.children


def test_tokens_that_another_one_holds_stay_outside() -> None:
    index = PrefixIndex()
    filled(index, 1, path(1, 2, 3))
    assert index.extend(2, path(1, 2, 3), 3) == 0
    assert index.num_cells == 3


def test_scopes_never_meet() -> None:
    index = PrefixIndex()
    filled(index, 1, path(1, 2, 3))
    assert index.match(path(1, 2, 3, scope=BLUE), 3).num_held == 0
    assert index.match(path(1, 2, 3, scope=Scope("red", "salt")), 3).num_held == 0
    assert index.match(path(1, 2, 3, scope=Scope("red", "", b"adapter")), 3).num_held == 0


def test_public_tokens_are_shared_up_to_where_they_end() -> None:
    index = PrefixIndex()
    filled(index, 1, path(1, 2, 3, 4, num_public=2))
    assert index.match(path(1, 2, 3, 4, scope=BLUE, num_public=2), 4).num_held == 2
    assert index.match(path(1, 2, 3, 4, scope=BLUE, num_public=3), 4).num_held == 2
    assert index.match(path(1, 2, 3, 4, scope=BLUE), 4).num_held == 0
    assert index.match(path(1, 2, 3, 4, num_public=2), 4).num_held == 4


def test_saved_blocks_follow_what_is_held() -> None:
    index = PrefixIndex()
    filled(index, 1, path(*range(10)))
    for start, end in index.unsaved(1, BLOCK):
        index.store(1, Block(start, end, b"state"))
    assert index.unsaved(1, BLOCK) == []
    index.share(2, path(*range(10)), 3)
    index.release(1)
    match = index.match(path(*range(6), 77), 7)
    assert match.num_held == 3
    assert [(part.start, part.end) for part in match.restores] == [(3, 4), (4, 6)]
    assert match.num_known == 6


def test_a_block_across_a_fork_serves_one_side_whole_and_the_other_in_part() -> None:
    index = PrefixIndex()
    filled(index, 1, path(0, 1, 2, 3, 4, 5, 6, 7))
    index.store(1, Block(4, 8, b"state"))
    index.share(2, path(0, 1, 2, 3, 4, 5, 9, 9), 6)
    filled(index, 2, path(0, 1, 2, 3, 4, 5, 9, 9))
    assert index.unsaved(2, BLOCK) == [(4, 8)]
    index.store(2, Block(4, 8, b"other"))
    for end, tokens in ((8, (6, 7)), (8, (9, 9)), (6, (8, 8))):
        index_of_rest = index.match(path(0, 1, 2, 3, 4, 5, *tokens), 8)
        assert index_of_rest.num_known == end


def test_a_longer_block_makes_the_shorter_one_needless() -> None:
    index = PrefixIndex()
    filled(index, 1, path(0, 1))
    short = Block(0, 2, b"short")
    index.store(1, short)
    filled(index, 1, path(0, 1, 2, 3))
    assert index.unsaved(1, BLOCK) == [(0, 4)]
    assert index.store(1, Block(0, 4, b"long")) == [short]


def test_a_saved_part_is_found_behind_a_gap() -> None:
    index = PrefixIndex()
    line = path(*range(8))
    first, last = Block(0, 2, b"a"), Block(4, 8, b"b")
    for block in (first, last):
        index.put(line, block)
    assert index.match(line, 8).num_known == 2
    assert index.match(line, 8, 2).restores == ()
    assert [index.match(line, 7, start).restores for start in (1, 4, 5)] == [
        (Restore(first, 1, 2),),
        (Restore(last, 4, 7),),
        (Restore(last, 5, 7),),
    ]


def test_a_longer_state_leaves_those_that_are_spared() -> None:
    index = PrefixIndex()
    line = path(*range(8))
    short, long, again = Block(0, 4, b"a"), Block(0, 8, b"b"), Block(0, 4, b"c")
    assert index.put(line, short) == []
    assert index.put(line, long, lambda block: block is short) == []
    assert index.put(line, again, lambda block: True) == [short], "one that is as long replaces it all the same"
    assert [index.match_checkpoint(line, limit).end for limit in (3, 4, 7, 8)] == [0, 4, 4, 8]
    assert not is_fork(again)
    index.put(path(0, 1, 2, 3, 9), Block(0, 5, b"d"), is_fork)
    assert is_fork(again)
    last = Block(0, 8, b"e")
    assert index.put(line, last, is_fork) == [long]
    assert index.match_checkpoint(line, 7).block is again
    assert index.put(line, Block(0, 8, b"f")) != [], "else the longer one replaces all that it has"
    assert index.match_checkpoint(line, 7).block is None
    index.check()


def test_of_two_checkpoints_as_long_the_one_with_cells_is_taken() -> None:
    for _ in range(20):  # a set's order is anything
        index = PrefixIndex()
        line = path(*range(8))
        filled(index, 1, line)
        mark, whole = Block(8, 8, b"part"), Block(0, 8, b"whole")
        index.mark(1, 8, mark)
        index.store(1, whole)
        assert index.match_checkpoint(line, 8) == Checkpoint(8, 1, mark)
        index.release(1)
        assert index.match_checkpoint(line, 8) == Checkpoint(8, -1, whole)


def test_checkpoints_are_taken_up_where_they_were_saved_and_nowhere_else() -> None:
    index = PrefixIndex()
    filled(index, 1, path(0, 1, 2, 3, 4, 5))
    part = Block(3, 3, b"part")
    index.mark(1, 3, part)
    found = index.match_checkpoint(path(0, 1, 2, 3, 9), 5)
    assert (found.end, found.holder, found.block) == (3, 1, part)
    assert index.match_checkpoint(path(0, 1, 2, 9), 4).end == 3
    assert index.match_checkpoint(path(0, 1, 9), 3).end == 0
    whole = Block(0, 6, b"whole")
    index.store(1, whole)
    index.release(1)
    assert index.match_checkpoint(path(0, 1, 2, 3, 4, 5, 6), 7).block is whole
    assert index.match_checkpoint(path(0, 1, 2, 3, 4, 9), 6).end == 0, "without its cells a part is of no use"


def test_a_path_can_be_read_back_from_its_last_node() -> None:
    index = PrefixIndex()
    for sequence, tokens in enumerate([(1, 2, 3, 4), (1, 2, 8, 9), (1, 5)]):
        what = path(*tokens, num_public=2)
        index.share(sequence, what, index.match(what, 4).num_held)
        filled(index, sequence, what)
        node = next(index.nodes_of(sequence))
        back = [node.leading(start, end).tolist() for start in range(5) for end in range(start, len(tokens) + 1)]
        assert back == [list(tokens[start:end]) for start in range(5) for end in range(start, len(tokens) + 1)]
        assert (node.scope, node.num_public) == (RED if len(tokens) > 2 else RED.public, 2)


def num_nodes(index: PrefixIndex, what: Path) -> int:
    return len({node for block in index.own_blocks(what) for node in block.nodes})


@pytest.mark.parametrize("is_held", [True, False])
def test_lengths_that_were_asked_for_leave_nothing_behind(is_held: bool) -> None:
    """Each would make every look at a long conversation longer, for as long as it is cached."""
    index, line = PrefixIndex(), path(*range(100))
    filled(index, 0, line)
    for start, end in index.unsaved(0, BLOCK):
        index.store(0, Block(start, end, line.tokens[start:end].tobytes()))
    if not is_held:
        index.release(0)
    for length in range(1, 100):
        index.share(1, line, length)
        if length % 2:
            filled(index, 1, path(*range(length), 100 + length))
        index.release(1)
        index.check()
    index.release(0)
    assert num_nodes(index, line) == 1
    match = index.match(line, 100)
    assert [(part.start, part.end) for part in match.restores] == [(n, n + BLOCK) for n in range(0, 100, BLOCK)]


def test_forks_and_checkpoints_cut_a_run_for_as_long_as_they_are_there() -> None:
    index, line, other = PrefixIndex(), path(*range(20)), path(*range(10), 99)
    filled(index, 0, line)
    fork, mark, whole = Block(8, 11, b"fork"), Block(15, 15, b"mark"), Block(0, 20, b"whole")
    index.put(other, fork)
    index.mark(0, 15, mark)
    index.store(0, whole)
    assert len(list(index.nodes_of(0))) == len(whole.nodes) == 3
    index.drop(fork)
    assert len(list(index.nodes_of(0))) == len(whole.nodes) == 2
    index.drop(mark)
    assert len(list(index.nodes_of(0))) == len(whole.nodes) == 1
    index.check()
    assert index.match(line, 20).num_held == 20


def test_what_came_back_part_by_part_is_one_run_when_it_goes_on() -> None:
    index, line = PrefixIndex(), path(*range(24))
    for start in range(0, 20, BLOCK):
        index.put(line, Block(start, start + BLOCK, b""))
    for end in range(BLOCK, 21, BLOCK):
        index.extend(0, line, end)
    filled(index, 0, line)
    assert len(list(index.nodes_of(0))) == 1
    index.check()


@pytest.mark.parametrize(("one", "other", "length"), [("", "1", 0), ("12", "12", 2), ("12", "13", 1), ("2", "12", 0)])
def test_common(one: str, other: str, length: int) -> None:
    assert common(*(np.array([int(digit) for digit in text], np.int32) for text in (one, other))) == length


tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class AnyUse(RuleBasedStateMachine):
    """Sequences come, take what is there, compute the rest, are saved and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[int, Path] = {}
        self.saved: list[Block] = []
        self.next = 0

    def _tokens(self, sequence: int) -> Tokens:
        return self.held[sequence].tokens[: self.index.held_by(sequence)]

    @rule(tokens=tokens_of, scope=st.sampled_from([RED, BLUE]), num_public=st.integers(0, 3))
    def enter(self, tokens: list[int], scope: Scope, num_public: int) -> None:
        what = path(*tokens, scope=scope, num_public=num_public)
        match = self.index.match(what, len(tokens))
        if match.num_held:
            self.index.share(self.next, what, match.num_held)
        assert self.index.extend(self.next, what, len(tokens)) == len(tokens)
        self.held[self.next] = what
        self.next += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=tokens_of)
    def go_on(self, data: st.DataObject, more: list[int]) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.held)))
        old = self.held[sequence]
        longer = Path(np.concatenate((self._tokens(sequence), np.array(more, np.int32))), old.scope, old.num_public)
        self.held[sequence] = longer
        self.index.extend(sequence, longer, len(longer.tokens))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), save=st.booleans())
    def leave(self, data: st.DataObject, save: bool) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.held)))
        if save:
            for start, end in self.index.unsaved(sequence, BLOCK):
                block = Block(start, end, self._tokens(sequence)[start:end].tobytes())
                needless = self.index.store(sequence, block)
                self.saved = [one for one in (*self.saved, block) if one not in needless]
            assert self.index.unsaved(sequence, BLOCK) == []
        self.index.release(sequence)
        del self.held[sequence]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave_the_end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.held)))
        start = data.draw(st.integers(0, self.index.held_by(sequence)))
        self.index.release(sequence, start)
        assert self.index.held_by(sequence) == start

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.index.drop(self.saved.pop(data.draw(st.integers(0, len(self.saved) - 1))))

    @rule(tokens=tokens_of, scope=st.sampled_from([RED, BLUE]), num_public=st.integers(0, 3))
    def match(self, tokens: list[int], scope: Scope, num_public: int) -> None:
        what = path(*tokens, scope=scope, num_public=num_public)
        match = self.index.match(what, len(tokens))
        most = 0
        for sequence, other in self.held.items():
            length = min(common(self._tokens(sequence), what.tokens), len(what.tokens))
            while length and any(other.scope_at(n) != what.scope_at(n) for n in range(length)):
                length -= 1
            most = max(most, length)
        assert match.num_held == most
        position = most
        for part in match.restores:
            assert part.start == position
            assert part.block.start <= part.start < part.end <= part.block.end
            position = part.end
            state = np.frombuffer(part.block.state, np.int32)
            assert (
                state[part.start - part.block.start :][: part.end - part.start] == what.tokens[part.start : part.end]
            ).all()

    @invariant()
    def books_are_right(self) -> None:
        self.index.check()


AnyUse.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_any_use = AnyUse.TestCase
