"""docs/migration.md: its examples of `paddock import` give what stands there, and the catalog's reader takes it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

from accounts.access.declaration import read_declaration
from tests.unit.gateway.imports.importing import run
from workers.models.catalog import convert

PAGE = (Path(__file__).parents[4] / "docs" / "migration.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line.strip() for line in re.findall(r"^    (paddock import .*)$", PAGE, re.MULTILINE)]


def test_what_stands_there_is_made(tmp_path: Path) -> None:
    inputs, outputs = BLOCKS[::2], BLOCKS[1::2]
    assert len(COMMANDS) == len(inputs) == len(outputs) == 2
    for command, given, expected in zip(COMMANDS, inputs, outputs, strict=True):
        words = shlex.split(command)[1:]
        (tmp_path / words[1]).write_text(given)
        done = run(tmp_path, *words, "--force")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "models.yaml").read_text() == expected
        assert convert(yaml.safe_load(expected), "the page").models
        assert read_declaration((tmp_path / "access.yaml").read_bytes()).aliases
