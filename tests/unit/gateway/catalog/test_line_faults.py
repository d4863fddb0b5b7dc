"""Faults of a catalog's text, each with the line that it stands in."""

from __future__ import annotations

import pytest

from gateway.catalog.line_faults import check_text
from workers.models.catalog import Catalog
from workers.models.spec import ModelSpec

BEFORE = Catalog(models=(ModelSpec(name="one", path="one.gguf", chat_template="by-hand.txt"),))
"""The catalog in use."""
GOOD = "models:\n  - {name: one, path: one.gguf}\naliases:\n  gpt: one\n"


def lines_of(text: str) -> list[tuple[int, str]]:
    found, faults = check_text(text, BEFORE)
    assert found is None
    return [(fault.line, fault.message) for fault in faults]


def test_a_good_text_is_a_catalog() -> None:
    found, faults = check_text(GOOD, BEFORE)
    assert found is not None
    assert (faults, [model.name for model in found.models]) == ([], ["one"])


def test_all_faults_of_the_form_have_their_lines() -> None:
    text = """# two models
models:
  - name: one
    path: one.gguf
    slotz: 3
  - name: two

    path: two.gguf
    llama:
      n_ctx: 3
"""
    told = lines_of(text)
    assert [line for line, _ in told] == [5, 10]
    assert "did you mean `slots`?" in told[0][1]
    assert told[1][1].startswith("models[1] (two): llama: unknown field `n_ctx`")


@pytest.mark.parametrize(
    ("added", "line", "told"),
    [
        ("  other: nobody\n", 5, "aliases.other: no model is named 'nobody'"),
        ("  one: one\n", 0, ""),
        ("default: {chat: nobody}\n", 5, "default.chat: no model or alias"),
    ],
)
def test_a_rule_that_is_broken_has_its_line(added: str, line: int, told: str) -> None:
    if not told:
        assert check_text(GOOD + added, BEFORE)[0] is not None
        return
    [(found, message)] = lines_of(GOOD + added)
    assert (found, message[: len(told)]) == (line, told)


def test_a_model_that_is_named_twice() -> None:
    [(line, message)] = lines_of("models:\n- {name: a, path: a}\n- {name: b, path: b}\n\n- {name: a, path: c}\n")
    assert (line, message) == (5, "models[2] (a): the name is used twice; rename one of the two models")


def test_all_rules_that_are_broken_have_their_lines() -> None:
    told = lines_of(f"{GOOD}  one: two\n  a-1.5: {{targets: [nobody]}}\ndefault: {{chat: nobody}}\n")
    assert [(line, message.partition(":")[0]) for line, message in told] == [
        (5, "aliases.one"),
        (5, "aliases.one"),
        (6, "aliases.a-1.5.targets[0]"),
        (7, "default.chat"),
    ]
    many = "".join(f"  a{number}: nobody\n" for number in range(14))
    *first, last = lines_of(GOOD + many)
    assert [line for line, _ in first] == list(range(5, 15))
    assert last == (0, "and 4 more")


@pytest.mark.parametrize("text", ["models: [\n", "a: 'b\n", "models:\n  - {name: a\n    path: b}\n"])
def test_what_is_no_yaml_has_its_line(text: str) -> None:
    [(line, message)] = lines_of(text)
    assert line >= 1
    assert message.startswith("not valid YAML or JSON: ")


@pytest.mark.parametrize("text", ["", "[]", "models: 3\n", "models: {}\n", "- 1\n- 2\n"])
def test_what_is_no_catalog(text: str) -> None:
    assert lines_of(text)


@pytest.mark.parametrize("named", ["chatml", "chat.jinja", "'{{ messages }}'", "by-hand.txt", "''"])
def test_templates_may_be_named(named: str) -> None:
    assert check_text(f"models:\n  - {{name: one, path: one.gguf, chat_template: {named}}}\n", BEFORE)[0] is not None


@pytest.mark.parametrize("named", ["../state/gateway-secret", "/etc/passwd", "by-hand.txt~"])
def test_files_without_a_templates_ending_are_refused(named: str) -> None:
    """Everybody is shown a model's template: an admin's key read any file of the machine by it."""
    text = f"models:\n  - name: one\n    path: one.gguf\n    chat_template: {named}\n"
    [(line, message)] = lines_of(text)
    assert line == 4
    assert message.startswith(
        f"models[0] (one): chat_template: {named!r} is no template's name, and no file whose name ends"
    )
