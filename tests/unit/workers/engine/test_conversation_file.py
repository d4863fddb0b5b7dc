from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.process_limits import few_descriptors
from tests.unit.workers.engine.disk_support import FINGERPRINT, KEYS, SAVE_BOUNDS, TEAM
from workers.engine.cache.prompt import Scope
from workers.engine.cache.slots import SavedBlock, SavedConversation
from workers.engine.disk.conversation_file import (
    ConversationFiles,
    ConversationOverBound,
    ConversationsOutOfReach,
    ConversationUnusable,
    SaveBounds,
    TeamSaveLimits,
)
from workers.engine.disk.sealed import CacheKeys

MAX_BYTES = 1 << 24
SAVED = SavedConversation(
    np.arange(150, dtype=np.int32),
    (SavedBlock(0, 64, b"a" * 1000), SavedBlock(64, 128, b"b" * 999), SavedBlock(128, 149, b"c")),
)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[ConversationFiles]:
    one = ConversationFiles(tmp_path / "slots", KEYS, SAVE_BOUNDS)
    yield one
    one.close()


def same(one: SavedConversation, other: SavedConversation) -> bool:
    return one.tokens.tolist() == other.tokens.tolist() and one.blocks == other.blocks


def read(
    kept: ConversationFiles, name: str = "chat", scope: Scope = TEAM, fingerprint: bytes = FINGERPRINT
) -> SavedConversation:
    return kept.read(name, scope, fingerprint, max_bytes=MAX_BYTES)


def refusal(kept: ConversationFiles, name: str = "chat", scope: Scope = TEAM, fingerprint: bytes = FINGERPRINT) -> str:
    with pytest.raises(ConversationUnusable) as caught:
        read(kept, name, scope, fingerprint)
    return str(caught.value)


def path_of(tmp_path: Path, name: str = "chat") -> Path:
    return tmp_path / "slots" / KEYS.tenant_folder("blue") / name


def test_a_conversation_is_saved_restored_and_replaced(kept: ConversationFiles, tmp_path: Path) -> None:
    written = kept.write("chat", TEAM, FINGERPRINT, SAVED)
    assert path_of(tmp_path).stat().st_size == written
    assert path_of(tmp_path).stat().st_mode & 0o777 == 0o600
    assert same(read(kept), SAVED)
    empty = SavedConversation(np.empty(0, np.int32), ())
    kept.write("chat", TEAM, FINGERPRINT, empty)
    assert same(read(kept), empty)
    assert "save the slot under this name first" in refusal(kept, "other")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../chat", "a/b", "/etc/passwd", ".hidden", "a\x00b", "a\nb", "x" * 129, "ü", "a\\b"]
)
def test_a_name_can_not_leave_the_folder(kept: ConversationFiles, name: str) -> None:
    assert "filename" in refusal(kept, name)
    with pytest.raises(ConversationUnusable):
        kept.write(name, TEAM, FINGERPRINT, SAVED)


def test_nobody_else_restores_it(kept: ConversationFiles, tmp_path: Path) -> None:
    kept.write("chat", TEAM, FINGERPRINT, SAVED)
    red = Scope("red")
    assert "no such file" in refusal(kept, scope=red)
    theirs = tmp_path / "slots" / KEYS.tenant_folder("red")
    theirs.mkdir()
    shutil.copy(path_of(tmp_path), theirs / "chat")
    assert "another team" in refusal(kept, scope=red)
    assert "another team, salt or adapter" in refusal(kept, scope=Scope("blue", "salt"))
    assert "another team, salt or adapter" in refusal(kept, scope=Scope("blue", "", b"adapter"))
    assert "another model" in refusal(kept, fingerprint=b"o" * 32)
    other = ConversationFiles(tmp_path / "slots", CacheKeys("other"), SAVE_BOUNDS)
    (tmp_path / "slots" / CacheKeys("other").tenant_folder("blue")).symlink_to(path_of(tmp_path).parent)
    with pytest.raises(ConversationsOutOfReach, match="can't be read"):
        read(other)
    other.close()


def test_links_are_not_followed(kept: ConversationFiles, tmp_path: Path) -> None:
    kept.write("chat", TEAM, FINGERPRINT, SAVED)
    path_of(tmp_path, "link").symlink_to("chat")
    assert "it is a link" in refusal(kept, "link")
    outside = tmp_path / "outside"
    outside.write_text("precious")
    path_of(tmp_path, "out").symlink_to(outside)
    kept.write("out", TEAM, FINGERPRINT, SAVED)
    assert outside.read_text() == "precious"
    assert same(read(kept, "out"), SAVED)


@given(st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_goes_unnoticed(kept: ConversationFiles, tmp_path: Path, data: st.DataObject) -> None:
    kept.write("chat", TEAM, FINGERPRINT, SAVED)
    path = path_of(tmp_path)
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole = whole[:at]
    else:
        whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    assert "save the slot again" in refusal(kept)


@pytest.mark.parametrize(
    "blocks",
    [
        (SavedBlock(1, 64, b"a"),),
        (SavedBlock(0, 64, b"a"), SavedBlock(65, 128, b"b")),
        (SavedBlock(0, 0, b"a"),),
        (SavedBlock(0, 151, b"a"),),
    ],
)
def test_blocks_that_do_not_follow_each_other_are_refused(
    kept: ConversationFiles, blocks: tuple[SavedBlock, ...]
) -> None:
    kept.write("chat", TEAM, FINGERPRINT, SavedConversation(SAVED.tokens, blocks))
    assert "it is damaged: a block of tokens" in refusal(kept)


def test_what_is_too_large_is_refused_before_it_is_read(kept: ConversationFiles) -> None:
    kept.write("chat", TEAM, FINGERPRINT, SAVED)
    with pytest.raises(ConversationUnusable, match="more than the 1,000 allowed"):
        kept.read("chat", TEAM, FINGERPRINT, max_bytes=1000)
    with pytest.raises(ConversationUnusable, match="150 tokens are more than the 149"):
        kept.read("chat", TEAM, FINGERPRINT, max_bytes=MAX_BYTES, max_tokens=149)


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50),
    st.lists(st.tuples(st.integers(1, 20), st.binary(max_size=50)), max_size=5),
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_conversation_comes_back(
    kept: ConversationFiles, tokens: list[int], sizes: list[tuple[int, bytes]]
) -> None:
    blocks, at = [], 0
    for length, state in sizes:
        if at + length <= len(tokens):
            blocks.append(SavedBlock(at, at + length, state))
            at += length
    saved = SavedConversation(np.array(tokens, dtype=np.int32), tuple(blocks))
    kept.write("any", TEAM, FINGERPRINT, saved)
    assert same(read(kept, "any"), saved)


def test_a_block_of_the_disk_tier_is_no_conversation(kept: ConversationFiles, tmp_path: Path) -> None:
    kept.write("chat", TEAM, FINGERPRINT, SAVED)
    whole = path_of(tmp_path).read_bytes()
    assert whole[10] == 2
    path_of(tmp_path).write_bytes(whole[:10] + b"\x01" + whole[11:])
    assert "save the slot again" in refusal(kept)


def bounded(tmp_path: Path, files: int = 99, team_kib: int = 999, all_kib: int = 999) -> ConversationFiles:
    return ConversationFiles(tmp_path / "slots", KEYS, SaveBounds(files, team_kib << 10, all_kib << 10))


RED = Scope("red")
LARGE = SavedConversation(np.arange(9, dtype=np.int32), (SavedBlock(0, 9, b"x" * 9_000),))


def test_a_team_has_so_many_files_and_erasing_frees(tmp_path: Path) -> None:
    kept = bounded(tmp_path, files=2)
    for name in ("a", "b"):
        kept.write(name, TEAM, FINGERPRINT, SAVED)
    with pytest.raises(ConversationOverBound, match=r"has 2 saved slots, and slot_saves_per_team is 2.*action=erase"):
        kept.write("c", TEAM, FINGERPRINT, SAVED)
    kept.write("a", TEAM, FINGERPRINT, SAVED)
    kept.write("c", RED, FINGERPRINT, SAVED)
    size = path_of(tmp_path, "a").stat().st_size
    assert kept.erase("a", "blue") == size
    assert not path_of(tmp_path, "a").exists()
    kept.write("c", TEAM, FINGERPRINT, SAVED)
    for name, team in (("a", "blue"), ("b", "red"), ("c", "green")):
        with pytest.raises(ConversationUnusable, match="there is no such file"):
            kept.erase(name, team)
    assert same(read(kept, "b"), SAVED)
    for name in ("../b", "", ".b"):
        with pytest.raises(ConversationUnusable, match="at most 128"):
            kept.erase(name, "blue")


@pytest.mark.parametrize(
    ("bounds", "says"), [({"team_kib": 20}, "slot_save_mib_per_team is"), ({"all_kib": 20}, "slot_save_mib is")]
)
def test_a_team_and_all_have_so_many_bytes(tmp_path: Path, bounds: dict[str, int], says: str) -> None:
    kept = bounded(tmp_path, **bounds)
    for name in ("a", "b"):
        kept.write(name, TEAM, FINGERPRINT, LARGE)
    with pytest.raises(ConversationOverBound, match=says):
        kept.write("c", TEAM, FINGERPRINT, LARGE)
    assert not path_of(tmp_path, "c").exists()
    kept.write("a", TEAM, FINGERPRINT, LARGE)  # in its own place
    if "all_kib" in bounds:
        with pytest.raises(ConversationOverBound, match=says):
            kept.write("a", RED, FINGERPRINT, LARGE)
    else:
        kept.write("a", RED, FINGERPRINT, LARGE)
    kept.erase("b", "blue")
    kept.write("c", TEAM, FINGERPRINT, LARGE)


def test_a_team_s_own_limits_replace_the_settings(tmp_path: Path) -> None:
    kept = bounded(tmp_path, files=2, team_kib=20)

    def write(name: str, files: int | None = None, kib: int | None = None) -> None:
        limits = TeamSaveLimits(files, None if kib is None else kib << 10)
        kept.write(name, TEAM, FINGERPRINT, LARGE, limits)

    write("a")
    with pytest.raises(ConversationOverBound, match="1 saved slots, and the limit `saved_slots` of the team or its"):
        write("b", files=1)
    with pytest.raises(ConversationOverBound, match=r"limit `saved_slot_bytes` of the team .* is 10,240\. Erase some"):
        write("b", kib=10)
    write("b")
    with pytest.raises(ConversationOverBound, match="slot_saves_per_team is 2"):
        write("c", kib=40)
    with pytest.raises(ConversationOverBound, match="slot_save_mib_per_team is"):
        write("c", files=3)
    write("c", files=3, kib=40)
    with pytest.raises(ConversationOverBound, match="slot_saves_per_team is 2"):
        write("d")
    assert kept.check_room("d", "blue", limits=TeamSaveLimits(9, 1 << 30)) == (999 << 10) - 3 * size_of(tmp_path)
    with pytest.raises(ConversationOverBound, match="slot_save_mib is"):
        kept.check_room("d", "blue", 1 << 20, TeamSaveLimits(9, 1 << 30))


def size_of(tmp_path: Path) -> int:
    return path_of(tmp_path, "a").stat().st_size


def test_what_killed_workers_left_counts_for_an_hour(tmp_path: Path) -> None:
    kept = bounded(tmp_path, team_kib=20)
    kept.write("a", TEAM, FINGERPRINT, LARGE)
    left = path_of(tmp_path, ".0123456789abcdef.tmp")
    left.write_bytes(b"x" * 9_000)
    with pytest.raises(ConversationOverBound):
        kept.write("b", TEAM, FINGERPRINT, LARGE)
    os.utime(left, (0, 0))
    kept.write("b", TEAM, FINGERPRINT, LARGE)
    assert not left.exists()


def attempts(kept: ConversationFiles) -> list[Callable[[], object]]:
    return [
        lambda: kept.check_room("chat", "blue"),
        lambda: kept.write("chat", TEAM, FINGERPRINT, SAVED),
        lambda: read(kept),
        lambda: kept.erase("chat", "blue"),
    ]


def test_a_folder_that_is_a_file_is_out_of_reach_and_the_reason_in_the_log(
    kept: ConversationFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path_of(tmp_path).parent.write_text("")
    for attempt in attempts(kept):
        caplog.clear()
        with pytest.raises(ConversationsOutOfReach, match=r"chat: can't be .* the worker's log says why") as caught:
            attempt()
        assert "Not a directory" in caplog.text
        assert "directory" not in str(caught.value)


def test_without_descriptors_the_folder_is_out_of_reach(kept: ConversationFiles) -> None:
    kept.write("chat", TEAM, FINGERPRINT, SAVED)
    for attempt in attempts(kept):
        with few_descriptors(), pytest.raises(ConversationsOutOfReach):
            attempt()
    assert same(read(kept), SAVED)


def test_in_a_folder_that_is_gone_nothing_is_saved_and_no_file_is_found(
    kept: ConversationFiles, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "slots")
    with pytest.raises(ConversationsOutOfReach):
        kept.write("chat", TEAM, FINGERPRINT, SAVED)
    assert "there is no such file" in refusal(kept)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO])
def test_a_full_disk_is_told_apart_from_a_broken_one(
    kept: ConversationFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "writev", fail)
    is_full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    with pytest.raises(ConversationOverBound if is_full else ConversationsOutOfReach) as caught:
        kept.write("chat", TEAM, FINGERPRINT, SAVED)
    assert ("the disk with the saved slots is full" in str(caught.value)) == is_full
    assert os.strerror(number) in caplog.text
    assert os.strerror(number) not in str(caught.value)
