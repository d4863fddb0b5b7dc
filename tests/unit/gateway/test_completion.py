"""`paddock completion`: its script is sourced by a real bash, which then completes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import cli
from gateway.commands import completion

COMPLETE = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_paddock
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = subprocess.run(
        [sys.executable, "-m", "gateway.cli", "completion", "bash"], capture_output=True, text=True, check=True
    )
    file = tmp_path_factory.mktemp("completion") / "paddock.bash"
    file.write_text(made.stdout)
    return file


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("paddock k", {"keys"}),
        ("paddock keys ro", {"rotate"}),
        ("paddock keys create --ex", {"--expires"}),
        ("paddock limits set --tokens", {"--tokens-per-day", "--tokens-per-month"}),
        ("paddock usage --b", {"--by"}),
        ("paddock usage ex", {"export"}),
        ("paddock budgets set --per ''", {"day", "week", "month"}),
        ("paddock completion ''", {"bash", "zsh", "fish"}),
        ("paddock up --kv", {"--kv-tokens"}),
        ("paddock chat --sys", {"--system"}),
        ("paddock drain g", {"gateway"}),
        ("paddock models p", {"pull", "plan"}),
        ("paddock models rm --u", {"--unfinished"}),
        ("paddock models list --models", {"--models-dir", "--models-mib"}),
        ("paddock import --from ''", {"llama-swap", "litellm"}),
    ],
)
def test_bash_completes(words: str, offered: set[str], script: Path) -> None:
    text = COMPLETE.format(script=script, words=words)
    done = subprocess.run(["bash", "--norc", "-c", text], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered
    assert done.stderr == ""


def test_every_command_is_offered(script: Path) -> None:
    text = COMPLETE.format(script=script, words="paddock ''")
    done = subprocess.run(["bash", "--norc", "-c", text], capture_output=True, text=True, check=True)
    assert {name for name, _ in cli.rows()} <= set(done.stdout.split())


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_their_scripts(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert completion.main([shell], dict(cli.rows())) == 0
    said = capsys.readouterr().out
    assert "rotate" in said
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    file = tmp_path / "script"
    file.write_text(said)
    subprocess.run([shell, "-n", str(file)], check=True)


def test_a_shell_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main(["tcsh"], {}) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err
    assert completion.main([], {}) == 0
    assert "~/.bashrc" in capsys.readouterr().out
