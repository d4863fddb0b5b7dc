"""`paddock cache`: what is on disk, and how a team's is erased."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gateway import cli
from tests.unit.workers.engine.disk_support import (
    FINGERPRINT,
    KEYS,
    SAVE_BOUNDS,
    SECRET,
    TEAM,
    files,
    names,
    states,
    store,
    tier,
)
from workers.commands import cache
from workers.engine.cache.prompt import Scope
from workers.engine.cache.slots import SavedConversation
from workers.engine.disk.conversation_file import ConversationFiles
from workers.engine.disk.sealed import version_folder
from workers.protocol.exits import Exit
from workers.secret_file import CACHE_SECRET
from workers.supervisor.state_folder import StateFolder

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Two teams' files, in both folders."""
    for fingerprint in (FINGERPRINT, b"y" * 32):
        with tier(tmp_path / "cache", fingerprint=fingerprint) as one:
            store(one, names(3), states(3))
            store(one, names(2, Scope("red")), states(2))
    slots = ConversationFiles(tmp_path / "slots", KEYS, SAVE_BOUNDS)
    for scope in (TEAM, Scope("red")):
        slots.write("chat", scope, FINGERPRINT, SavedConversation(np.arange(9, dtype=np.int32), ()))
    slots.close()
    return [
        *("--cache-dir", str(tmp_path / "cache"), "--slot-save-dir", str(tmp_path / "slots")),
        *("--cache-secret", SECRET, "--state-dir", str(tmp_path / "state")),
    ]


def run(*args: str) -> int:
    return cache.main(args)


def test_show_tells_versions_and_teams_by_their_folders(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", *flags) == 0
    out = capsys.readouterr().out
    assert out.count(f"version {version_folder(FINGERPRINT)}") == 2
    assert out.count(KEYS.tenant_folder("blue")) == 3
    assert "12 files" in out
    assert "blue" not in out
    assert run("show", "--tenant", "blue", "--json", *flags) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == 7
    assert {row["tenant"] for row in report["folders"]} == {KEYS.tenant_folder("blue")}
    assert report["bytes"] == sum(row["bytes"] for row in report["folders"]) > 6 * 4096


def test_erase_takes_one_team_of_every_version(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("erase", "--tenant", "blue", *flags) == 0
    assert capsys.readouterr().out == "7 files erased\n"
    left = files(tmp_path / "cache") + files(tmp_path / "slots")
    assert len(left) == 5
    assert not [path for path in left if KEYS.tenant_folder("blue") in path.parts]
    assert run("erase", "--tenant", "blue", *flags) == 0
    assert run("erase", "--all", *flags) == 0
    assert capsys.readouterr().out == "0 files erased\n5 files erased\n"
    assert files(tmp_path / "cache") + files(tmp_path / "slots") == []


def test_another_secret_finds_no_team(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("erase", "--tenant", "blue", *flags, "--cache-secret", "other") == 0
    assert capsys.readouterr().out == "0 files erased\n"
    assert len(files(tmp_path / "cache")) == 10


def test_the_secret_is_the_one_of_paddock_up_where_none_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StateFolder(tmp_path / "state") as folder:
        secret = folder.secret(CACHE_SECRET)
    with tier(tmp_path / "cache", secret=secret) as one:
        store(one, names(2), states(2))
    flags = ["--cache-dir", str(tmp_path / "cache"), "--state-dir", str(tmp_path / "state")]
    assert run("erase", "--tenant", "blue", *flags) == 0
    assert capsys.readouterr().out == "2 files erased\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["erase"], "--tenant --all is required"),
        (["erase", "--tenant", "a", "--all"], "not allowed with"),
        (["erase", "--tenant", "a"], "cache_dir is unset"),
        (["show"], "cache_dir is unset"),
        (["show", "--cache-dir", ".", "--cache-dir-x"], "--cache-dir-x"),
        (["burn"], "no such command"),
        (["erase", "--tenant", "a", "--cache-dir", "x"], "give PADDOCK_CACHE_SECRET, or the --state-dir"),
    ],
)
def test_what_can_not_be_done_is_said_in_a_line(
    args: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args, "--state-dir", str(tmp_path)) == Exit.USAGE
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_folder_that_others_may_write_to_is_not_touched(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").chmod(0o777)
    assert run("erase", "--all", *flags) == Exit.USAGE
    assert len(files(tmp_path / "cache")) == 10


def test_looking_makes_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "--cache-dir", str(tmp_path / "none"), "--state-dir", str(tmp_path)) == 0
    assert not (tmp_path / "none").exists()
    assert capsys.readouterr().out.startswith("0 files, 0.0 MiB")


def test_it_is_a_command_of_both_programs(flags: list[str]) -> None:
    assert "cache" in cli.overview()
    for module in ("gateway.cli", "workers.cli"):
        argv = [sys.executable, "-m", module, "cache", "show", "--json", *flags]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["files"] == 12
