"""The `paddock` program in the process of a test, with an environment of its own."""

from __future__ import annotations

import io
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from gateway import cli


@dataclass(frozen=True, slots=True)
class Done:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """The lines of a table, cut where two spaces or more are."""
        return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in self.out.splitlines()]

    @property
    def card(self) -> dict[str, str]:
        """The fields of a card; those of several lines with ` / ` between them."""
        found: dict[str, str] = {}
        name = ""
        for line in self.out.partition("\n\n")[0].splitlines():
            head, _, text = line.partition("  ")
            name, more = (head, False) if head.strip() else (name, True)
            found[name] = f"{found[name]} / {text.strip()}" if more else text.strip()
        return found


class Program:
    """Runs commands. `environment` replaces all variables of Paddock."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], environment: Mapping[str, str]
    ) -> None:
        self._patch = monkeypatch
        self._capture = capfd
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    def run(self, line: str, stdin: str = "") -> Done:
        """Run a command as a shell would."""
        self._patch.setattr(sys, "argv", ["paddock", *shlex.split(line)])
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        self._capture.readouterr()
        code = cli.main()
        sys.stdout.flush()
        said = self._capture.readouterr()
        return Done(code, said.out, said.err)

    def ok(self, line: str, stdin: str = "") -> Done:
        """Run a command that must end well, and print nothing to standard error."""
        done = self.run(line, stdin)
        assert (done.code, done.err) == (0, ""), done
        return done

    def refused(self, line: str, code: int, stdin: str = "") -> str:
        """Run a command that must fail with an exit code, and return its one line."""
        done = self.run(line, stdin)
        assert (done.code, done.out, done.err.count("\n")) == (code, "", 1), done
        return done.err.removeprefix("paddock: ").rstrip("\n")
