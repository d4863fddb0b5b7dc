"""What is declared in one place is told in the docs."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml

from gateway import cli
from gateway.commands import config
from gateway.commands.config import settings_page
from gateway.settings import UpSettings, known_settings
from workers.models.alias_parameters import AliasParameters
from workers.models.catalog import AliasChain, Catalog, Target, load, schema
from workers.models.generation import DefaultSampling, DraftSpec, SpeculationSettings
from workers.models.spec import AdapterSpec, LlamaSettings, ModelSpec
from workers.protocol import keys
from workers.protocol.exits import FINAL, RESTARTED, Exit
from workers.residency.policy import Group, Residency
from workers.settings import WorkerSettings
from workers.sources import default_text, flag, variable

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text()


def test_the_settings_page_is_what_the_classes_say() -> None:
    assert page("settings.md") == settings_page(), "run: paddock config docs > docs/settings.md"


@pytest.mark.parametrize("name", sorted(known_settings()))
def test_every_setting_is_documented_with_its_default(name: str) -> None:
    fields = {**WorkerSettings.model_fields, **UpSettings.model_fields}
    default = default_text(fields[name])
    row = f"| `{flag(name)}` | `{variable(name)}` | {f'`{default}`' if default else 'unset'} | "
    assert page("settings.md").count(row) == 1
    assert fields[name].description


def test_every_command_is_documented() -> None:
    told = page("settings.md")
    parts = (
        "cache show",
        "import",
        "models list",
        "models pull",
        "cache erase",
        "config show",
        "config schema",
        "config docs",
        "config compatibility",
        "config metrics",
    )
    for name in (*cli.COMMANDS, *parts):
        assert f"| `paddock {name}" in told, name
    for name in cli.ADMIN:
        assert re.search(rf"^\| `paddock [^|]*(\\\|[^|]*)*\b{name}\b", told, re.MULTILINE), name


def test_every_exit_code_is_documented_and_has_a_policy() -> None:
    assert set(Exit) == RESTARTED | FINAL
    assert not RESTARTED & FINAL
    for code in Exit:
        assert re.search(rf"^    {int(code)} +{code.name} ", page("settings.md"), re.MULTILINE), code


def test_the_published_schema_is_the_catalogs() -> None:
    assert page("catalog.schema.json") == config.schema_text(), "run: paddock config schema > docs/catalog.schema.json"
    jsonschema.Draft202012Validator.check_schema(schema())


def test_the_example_catalog_is_valid(tmp_path: Path) -> None:
    example = page("catalog.md").partition("```yaml\n")[2].partition("```")[0]
    file = tmp_path / "catalog.yaml"
    file.write_text(example)
    assert [model.name for model in load(file).models] == ["qwen3-8b", "gemma-3-1b"]
    document = yaml.safe_load(example)
    jsonschema.validate(document, schema())
    document["models"][0]["slotz"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema())


@pytest.mark.parametrize(
    "struct",
    [
        *(Catalog, ModelSpec, AdapterSpec, LlamaSettings, DefaultSampling, SpeculationSettings, DraftSpec),
        *(AliasChain, Target, AliasParameters, Residency, Group),
    ],
)
def test_every_field_of_a_catalog_is_documented(struct: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(struct):
        assert f"`{field.name}`" in page("catalog.md") or f"{field.name}:" in page("catalog.md"), field.name


def test_every_redis_key_is_documented() -> None:
    declared = re.findall(r"^    (\{?pd:\S+) ", keys.__doc__ or "", re.MULTILINE)
    made = {
        *(keys.USAGE, keys.USAGE_BATCHES, keys.USAGE_SET_ASIDE, keys.ACCESS_SUBJECTS, keys.ACCESS_CHANGES),
        *(keys.MODELS, keys.ACCESS_KEYS, keys.FLEET_CHANNEL, keys.gateway("<id>"), keys.grants_channel("<gateway>")),
        *(keys.workers("model"), keys.worker("model", "<id>"), keys.worker_leases("model", "<id>")),
        *(keys.calls("model"), keys.queue("model"), keys.ledger("model")),
        *(keys.adapters("model"), keys.adapter_scales("model"), keys.supervised("model"), keys.unloaded("model")),
        *(keys.stream("<id>"), keys.stream_log("<id>"), keys.stream_readers("<id>")),
        *(keys.streams("<team>"), keys.streams_ended("<team>"), keys.stream_sizes("<team>")),
        *(keys.limits_subject("<subject>"), keys.limits_log("<gateway>"), keys.limits_calls("<gateway>")),
        *(keys.LIMITS_GATEWAYS, keys.LIMITS_ROUND, keys.LIMITS_USED),
        *(keys.responses("<team>"), keys.response_sizes("<team>"), keys.response("<team>", "<id>")),
    }
    assert made <= set(declared)
    for name in declared:
        assert f"`{name}`" in page("redis.md"), name


OF_LIMITS = ("limits", "limits_gate", "limits_merge", "limits_window")
"""Parts of the scripts about limits."""


def test_every_script_is_told_with_what_it_keeps_true() -> None:
    folder = ROOT / "gateway" / "store" / "lua"
    scripts = {file.stem: file.read_text() for file in folder.glob("*.lua")}
    # What they are made of beside their own text.
    shared = "\n".join(scripts.pop(part) for part in ("shared", "line"))
    for part in ("overdraft", "tickets", "filing", "acquire_at_once", "release_at_once", *OF_LIMITS):
        del scripts[part]
    for name, text in scripts.items():
        assert "\n-- Keeps: " in text, name
        assert f"\n| `{name}` | " in page("redis.md" if name.endswith(("_response", "_streams")) else "placement.md"), (
            name
        )
    bounds = {name: int(value) for name, value in re.findall(r"^local ([A-Z_]+) = (\d+) ", shared, re.MULTILINE)}
    told = page("placement.md")
    assert f"the\nfirst {bounds['WINDOW']} tickets" in told or f"the first {bounds['WINDOW']} tickets" in told
    assert f"up to {bounds['WINDOW'] * bounds['WINDOWS']} in all" in told
    assert f"was overtaken {bounds['MOST_PASSED']} times is next" in told
    assert f"at most {bounds['MOST_PASSED']} times each" in page("metrics.md")


def test_show_is_the_whole_program_and_prints_json() -> None:
    command = [sys.executable, "-m", "gateway.cli", "config", "show", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) == set(UpSettings.model_fields)


FLAG = re.compile(r"(?<!\S)--[a-z][a-z0-9-]*")
OF_A_PART = {"cache", "drain", "redis", *cli.ADMIN}
"""Commands whose next word says what is done; the others have one help page."""


def commands_of_pages() -> dict[tuple[str, ...], set[str]]:
    """Return the commands that pages show -> the flags that they show with each."""
    shown: dict[tuple[str, ...], set[str]] = {}
    for page in (ROOT / "README.md", ROOT / "helm" / "README.md", *(ROOT / "docs").glob("*.md")):
        for name, rest in re.findall(r"(?<![\w/.-])paddock ([a-z]+)((?: [^`|;&#\n]*)?)", page.read_text()):
            words = rest.split()
            if name not in OF_A_PART | {*cli.COMMANDS, "bench", "chat"}:
                continue
            has_part = name in OF_A_PART and words and re.fullmatch("[a-z]+", words[0])
            shown.setdefault((name, *words[:1]) if has_part else (name,), set()).update(FLAG.findall(rest))
    return {words: flags for words, flags in shown.items() if flags}


@pytest.mark.parametrize("words", sorted(commands_of_pages()), ids=" ".join)
def test_the_flags_that_pages_show_are_in_the_commands_help(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["paddock", *words, "--help"])
    with contextlib.suppress(SystemExit):  # argparse's own way out of a help page
        assert cli.main() == 0
    told = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
    assert commands_of_pages()[words] <= told
