"""Documents of people who mistype, or mean harm: each is read, or refused in little time."""

from __future__ import annotations

import pytest

from workers.yaml_document import MAX_VALUES, YamlInvalid, compose_yaml, load_yaml


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 2026-13-45", "month must be in 1..12"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("[" * 500 + "]" * 500, "it is nested too deeply"),
        ("a: &a [*a]", "stands within what it names"),
        ("a: &a {<<: *a}", "stands within what it names"),
        ("a: [1", "expected ',' or ']'"),
        (r'a: "\ud83d"', "half of a character"),
        (r'{"\udc00 b": 1}', "half of a character"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_whatever_is_wrong_is_said_in_one_way(text: str, why: str) -> None:
    with pytest.raises(YamlInvalid) as refusal:
        load_yaml(text)
    assert why in str(refusal.value)


@pytest.mark.parametrize("way", ["[%s]", "{<<: [%s]}"])
def test_a_few_lines_do_not_become_billions_of_values(way: str) -> None:
    first = "[x, x]" if way[0] == "[" else "{a: x, b: x}"
    lines = [f"m0: &m0 {first}", *(f"m{n}: &m{n} {way % ','.join([f'*m{n - 1}'] * 10)}" for n in range(1, 12))]
    for read in (load_yaml, compose_yaml):
        with pytest.raises(YamlInvalid, match=str(MAX_VALUES)):
            read("\n".join(lines))


def test_characters_that_json_writes_in_two_halves_are_whole() -> None:
    """YAML takes these for two characters, which nothing can write as UTF-8: a catalog with such a tag was read, and
    listing the models failed for everybody."""
    assert load_yaml(r'{"tags": ["\ud83e\udd8a", "\u00e4", "a\tb"]}') == {"tags": ["\U0001f98a", "ä", "a\tb"]}


def test_aliases_and_merges_are_read() -> None:
    text = "base: &base {slots: 2, ctx: 64}\none: {<<: *base, ctx: 128}\ntwo: *base\nempty:\n"
    base = {"slots": 2, "ctx": 64}
    assert load_yaml(text) == {"base": base, "one": {**base, "ctx": 128}, "two": base, "empty": None}
    assert load_yaml(text.encode()) == load_yaml(text)
    assert load_yaml("") is None
    assert compose_yaml("") is None
