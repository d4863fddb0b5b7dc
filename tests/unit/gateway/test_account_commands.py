"""The commands over the admin API: words that are wrong are told before any gateway is called."""

from __future__ import annotations

import pytest

from gateway.commands.accounts.command import main


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--requests-per-minute", "--rpm"),
        ("--tokens-per-minute=7", "--tpm"),
        ("--max-parallel", "--parallel"),
        ("--tokens-per-dy", "--tokens-per-day"),
    ],
)
def test_a_flag_that_is_not_known_names_the_one_that_sets_the_same(
    wrong: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("limits", ["set", "team", "red", wrong, "5"], frozenset(), {}) == 2
    assert f"{wrong} is not known (did you mean {right}?)" in capsys.readouterr().err
