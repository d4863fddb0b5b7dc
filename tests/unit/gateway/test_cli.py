"""The `paddock` program's own words: overview, version, commands that do not exist, a command's flags."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gateway import __version__, cli
from gateway.commands import config
from gateway.settings import UpSettings
from workers import cli as workers_cli
from workers import sources
from workers.commands import command
from workers.commands.command import Command


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["paddock", *args])
    code = cli.main()
    output = capsys.readouterr()
    return code, output.out, output.err


def test_overview_and_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, overview, _ = said(capsys, monkeypatch)
    assert code == 0
    assert all(f"  {name} " in overview for name in ("up", "gateway", "worker", "supervisor", "config"))
    assert said(capsys, monkeypatch, "--version") == (0, f"paddock {__version__}\n", "")


def test_an_unknown_command_names_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, error = said(capsys, monkeypatch, "gatewy")
    assert code == 2
    assert error == "paddock: gatewy: no such command (did you mean gateway?); `paddock --help` lists them\n"
    assert said(capsys, monkeypatch, "config", "shw")[0] == 2


def test_the_workers_half_knows_its_own_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["paddock", "up"])
    assert workers_cli.main() == 2
    assert "use one of: worker, supervisor" in capsys.readouterr().err


def test_help_lists_every_flag_within_the_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        said(capsys, monkeypatch, "up", "--help")
    page = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"  {sources.flag(name)} " in page for name in UpSettings.model_fields)
    assert max(len(line) for line in page.splitlines()) <= sources.WIDTH


def test_a_bad_flag_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, error = said(capsys, monkeypatch, "up", "--port", "eighty")
    assert code == 2
    assert (
        error == "paddock: port: 'eighty' is not a whole number from 0 to 65535 (from flag --port); change the flag\n"
    )


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    missing = Command("no_such_library:Settings", "no_such_library:run", "", "worker")
    assert command.run("worker", missing, []) == 2
    assert "`paddock worker` needs no_such_library, which is not installed; install the extra 'worker': pip" in (
        capsys.readouterr().err
    )


def test_ctrl_c_and_a_reader_that_leaves_end_it_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert command.guarded(interrupted) == 130
    assert capfd.readouterr().err == "paddock: stopped\n"
    code = "import sys; sys.argv = ['paddock', 'config', 'show']; from gateway.cli import main; sys.exit(main())"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as nobody:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=nobody, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_config_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert config.main(["--help"]) == 0
    assert "show [--json]" in capsys.readouterr().out
    assert config.main(["schema"]) == 0
    assert config.main(["docs"]) == 0
