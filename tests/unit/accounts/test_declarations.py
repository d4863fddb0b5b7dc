"""The file of `paddock apply`: what is wrong with its structure is told with the remedy."""

from __future__ import annotations

import pytest

from accounts.access.declaration import read_declaration
from accounts.errors import Invalid


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[red]", "Expected `object`, got `array`"),
        (b"teams: {red: {}}", "`teams`: Expected `array`, got `object`"),
        (b"teams: [red]", "Expected `object`, got `str`"),
        (b"team: []", "The field `team` is not known"),
    ],
)
def test_a_structure_that_is_wrong_is_told_with_the_remedy(text: bytes, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        read_declaration(text)
    assert said in refused.value.message
    assert "an object of lists: organisations, teams, users, aliases, keys" in refused.value.message
    assert "docs/teams.md" in refused.value.message
