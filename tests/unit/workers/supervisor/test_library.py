"""From the settings to a checked catalog to files."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.llama.gguf import read_header
from workers.llama.native import ModelError
from workers.models.catalog import Catalog, CatalogError, load
from workers.models.library import DEMO_ALIAS, Library, ModelUnusable, check_gguf, demo, wanted
from workers.models.spec import AdapterSpec, ModelSpec
from workers.served_text import TemplateFileUnusable, template_of
from workers.settings import SupervisorSettings

GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "My Model (v2).gguf"
    path.write_bytes(GGUF)
    return path


def test_without_a_wish_it_is_the_demo() -> None:
    spec = wanted(SupervisorSettings()).models[0]
    assert (spec.name, spec.path, spec.workers, spec.slots) == (DEMO_ALIAS, str(demo()), 2, 8)


def test_one_model_with_its_settings(model: Path) -> None:
    spec = wanted(
        SupervisorSettings(model=model, workers=3, ctx=512, llama='{"n_batch": 64}', sampling='{"top_k": 5}')
    ).models[0]
    assert (spec.name, spec.workers, spec.ctx) == ("My-Model-v2", 3, 512)
    assert (spec.llama.n_batch, spec.sampling.top_k) == (64, 5)


def test_a_model_of_the_hub_is_named_after_its_repository() -> None:
    for reference in (
        "owner/Some-Model-GGUF:Q8_0",
        "owner/Some-Model-GGUF@main",
        f"owner/Some-Model-GGUF:Q8_0@{'0' * 40}",
    ):
        assert wanted(SupervisorSettings(hf=reference)).models[0].name == "Some-Model"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": "a.gguf", "hf": "o/r"}, "--model and --hf each say what to serve"),
        ({"catalog": "c.yaml", "slots": 4}, "slots: with a catalog, say this per model in c.yaml"),
        ({"alias": "no spaces"}, "--alias: 'no spaces' is no name"),
        ({"llama": "[]"}, "--llama: must be a JSON object"),
        ({"llama": "{"}, "--llama: not valid JSON"),
        ({"llama": '{"n_bath": 1}'}, "unknown field `n_bath`"),
        ({"sampling": '{"temprature": 0.1}'}, "unknown field `temprature`"),
        ({"sampling": '{"seed": 1099511627776}'}, "--sampling: seed: "),
    ],
)
def test_a_wish_that_can_not_be_met(values: dict[str, object], said: str) -> None:
    with pytest.raises(CatalogError) as caught:
        wanted(SupervisorSettings.model_validate(values))
    assert said in str(caught.value)


def test_paths_are_relative_to_the_catalog(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "catalog.yaml"
    file.write_text(f"models: [{{name: m, path: '{model.name}'}}]\naliases: {{gpt-4o: m}}\n")
    [found] = Library(tmp_path / "state").locate_all(wanted(SupervisorSettings(catalog=file)))
    assert (found.name, found.path) == ("m", str(model))


def test_a_model_without_workers_needs_no_file(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "catalog.yaml"
    file.write_text(f"models: [{{name: far, path: gone.gguf, workers: 0}}, {{name: near, path: '{model.name}'}}]\n")
    [found] = Library(tmp_path / "state").locate_all(wanted(SupervisorSettings(catalog=file)))
    assert (found.name, found.path) == ("near", str(model))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modelz: []", "unknown field `modelz` (did you mean `models`?)"),
        ("models: [{name: m, path: p}]\nslots: 3", "unknown field `slots` (it belongs to another place"),
        ("models: [{name: m, path: p, residency: {ttl: 3}}]", "residency: unknown field `ttl` (did you mean `ttl_s`?)"),
        ("models: []", "models: expected `array` of length >= 1"),
        ("models: [{name: m, path: p, slotz: 1}]", "models[0] (m): unknown field `slotz` (did you mean `slots`?)"),
        ("models: [{name: m, path: p, slots: 0}]", "models[0] (m): slots: expected `int` >= 1"),
        ("models: [{name: m, path: p, ctx: 16777217}]", "models[0] (m): ctx: expected `int` <= 16777216"),
        ("models: [{name: m, path: p, sampling: {temprature: 1}}]", "(did you mean `temperature`?)"),
        ("models: [{name: m, path: p, sampling: {temperature: -5}}]", "models[0] (m): sampling.temperature: "),
        ("models: [{name: m, path: p, sampling: {temperature: .nan}}]", "models[0] (m): sampling.temperature: "),
        ("models: [{name: m, path: p, sampling: {repeat_penalty: 0}}]", "models[0] (m): sampling.repeat_penalty: "),
        ("models: [{name: m, path: p, sampling: {top_k: 1000000000000}}]", "models[0] (m): sampling.top_k: "),
        ("models: [{name: m, path: p, workers: 0}]", "each model has `workers: 0`, so nothing would run"),
        ("models: [{name: m}]", "models[0] (m): give exactly one source"),
        ("models: [{name: m, path: p}, {name: m, path: q}]", "models[1] (m): the name is used twice"),
        ("models: [{name: m, path: p}]\naliases: {a: n}", "aliases.a: no model is named 'n'; use one of: m"),
        (
            "models: [{name: m, path: p}]\naliases: {a: {target: [m]}}",
            "aliases.a: unknown field `target` (did you mean `targets`?)",
        ),
        ("models: [{name: m, path: p}]\naliases: {b: m, a: {targets: []}}", "aliases.a: targets: "),
        (
            "models: [{name: m, path: p}]\naliases: {a: {targets: [m, n]}}",
            "aliases.a.targets[1]: no model is named 'n'",
        ),
        ("models: [{name: m, path: p}]\naliases: {a: {targets: [m, m]}}", "aliases.a.targets: 'm' is named twice"),
        (
            "models: [{name: m, path: p}]\naliases: {a: {targets: [{model: m, weight: 0}]}}",
            "aliases.a.targets: every weight is 0; give one of them a weight above 0",
        ),
        (
            "models: [{name: m, path: p}]\naliases: {b: m}\ndefault: {chat: b, embed: n}",
            "default.embed: no model or alias is named 'n'; use one of: b, m",
        ),
        ("models: [{name: m, path: p}]\ndefault: {chats: m}", "(did you mean `chat`?)"),
        ("models: [{name: m, path: p}]\nunknown_model: serve", "unknown_model: "),
        (
            "models: [{name: m, path: p}]\naliases: {b: m, a: {targets: [m], fallbacks: [c]}}",
            "aliases.a.fallbacks[0]: no model or alias is named 'c'; use one of: b, m",
        ),
        (
            "models: [{name: m, path: p}]\naliases: {a: {targets: [m], fallbacks: [m]}}",
            "aliases.a.fallbacks[0]: 'm' is a target already",
        ),
        (
            "models: [{name: m, path: p}]\n"
            "aliases: {a: {targets: [m], fallbacks: [b]}, b: {targets: [m], fallbacks: [a]}}",
            "aliases.a.fallbacks[0]: this leads back to 'a' (a -> b -> a); remove one of these",
        ),
        (
            "models: [{name: a, path: p, slotz: 1}, {name: b, path: p, slots: x}, {path: p}]\n"
            "aliases: {c: {target: [a]}}",
            "4 faults:\n  models[0] (a): unknown field `slotz` (did you mean `slots`?)\n"
            "  models[1] (b): slots: expected `int`, got `str`\n  models[2]: `name` is missing\n"
            "  aliases.c: unknown field `target`",
        ),
        ("models: [{name: m, hf: nonsense}]", "models[0] (m): hf: 'nonsense' is not OWNER/NAME[:QUANT][@REVISION]"),
        ("models: [", "not valid YAML or JSON"),
        ("", "catalog.yaml"),
    ],
)
def test_a_catalog_error_names_file_path_and_remedy(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "catalog.yaml"
    file.write_text(text)
    with pytest.raises(CatalogError) as caught:
        wanted(SupervisorSettings(catalog=file))
    assert str(file) in str(caught.value)
    assert said in str(caught.value)


def refused(folder: Path, text: str) -> list[str]:
    """Return the lines with which a catalog is refused, without its path."""
    file = folder / "catalog.yaml"
    file.write_text(text)
    with pytest.raises(CatalogError) as caught:
        load(file)
    head, *lines = str(caught.value).split("\n  ")
    return [head.removeprefix(f"{file}: "), *lines]


def test_all_broken_rules_of_a_catalog_are_told(tmp_path: Path) -> None:
    text = """
models:
- {name: z, path: p, residency: {group: nowhere}}
- {name: a, path: p}
- {name: a, hf: owner/repo, path: q}
- {name: b, path: r, llama: {tensor_split: [1, 1]}, adapters: [{name: x, path: x}, {name: x, path: y}]}
aliases: {c: nobody, d: {targets: [nobody, b], fallbacks: [b], strip: [temprature]}}
groups: {g: {at_once: 1}}
models_max: 1
default: {chat: nobody}
"""
    assert refused(tmp_path, text) == [
        "11 faults:",
        "models[0] (z): residency.group: no group is named 'nowhere'; use one of: g",
        "models[2] (a): give exactly one source: `path` (a GGUF file) or `hf` (REPO[:QUANT][@REVISION])",
        "models[2] (a): the name is used twice; rename one of the two models",
        "models[3] (b): `llama` speaks of 2 GPUs and each worker gets 1; raise `gpus`",
        "models[3] (b): adapters: 'x' is named twice; rename one of the two",
        "aliases.c: no model is named 'nobody'; use one of: a, b, z",
        "aliases.d.targets[0]: no model is named 'nobody'; use one of: a, b, z",
        "aliases.d.fallbacks[0]: 'b' is a target already, and targets stand in for each other; remove it",
        "aliases.d.strip: 'temprature' is no parameter that can be dropped; did you mean `temperature`?",
        "models_max: it is 1, and 2 models stay loaded (a, b); raise it, or give some of them `residency: {min: 0}`",
        "and 1 more",
    ]


def test_files_that_are_missing_are_told_with_broken_rules(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "catalog.yaml"
    file.write_text(
        f"models: [{{name: a, path: '{model}'}}, {{name: b, path: gone.gguf}}, {{name: c, path: x, workers: 0}}]\n"
        "aliases: {d: nobody}\n"
    )
    told = (
        f"{file}: 2 faults:\n"
        "  aliases.d: no model is named 'nobody'; use one of: a, b, c\n"
        f"  model b: no file {tmp_path}/gone.gguf; check the path"
    )
    with pytest.raises(CatalogError) as started:
        wanted(SupervisorSettings(catalog=file))
    assert str(started.value) == told


def test_what_is_wrong_with_one_entry_hides_no_fault_of_another(tmp_path: Path) -> None:
    text = """
models:
- {name: a, path: p, residency: {idle: sleep, min: 1, preload: true}}
- 3
- {name: b, path: q, slotz: 1}
"""
    head, *lines = refused(tmp_path, text)
    assert head == "4 faults:"
    assert [line.partition(";")[0] for line in lines] == [
        "models[0] (a): `residency.preload` has no use beside a `min`, whose workers load at the start",
        "models[0] (a): `residency.idle` is sleep, and `min` keeps a worker loaded",
        "models[1]: expected `object`, got `int`",
        "models[2] (b): unknown field `slotz` (did you mean `slots`?)",
    ]


def test_of_many_faults_the_first_are_told_and_how_many_more_there_are(tmp_path: Path) -> None:
    form = refused(tmp_path, f"models: [{', '.join(f'{{name: m{n}, path: p, slotz: 1}}' for n in range(13))}]")
    assert [form[0], *form[11:]] == ["13 faults:", "and 3 more; see docs/catalog.md for what each field takes"]
    aliases = ", ".join(f"a{number}: x" for number in range(12))
    rules = refused(tmp_path, f"models: [{{name: m, path: p}}]\naliases: {{{aliases}}}")
    assert [rules[0], rules[10], *rules[11:]] == [
        "12 faults:",
        "aliases.a9: no model is named 'x'; use one of: m",
        "and 2 more",
    ]


def test_all_files_that_are_missing_are_told_before_anything_is_fetched(tmp_path: Path, model: Path) -> None:
    gone, page = tmp_path / "gone.gguf", tmp_path / "page.gguf"
    page.write_bytes(b"<html>" + bytes(40))
    found = Catalog(
        models=(
            ModelSpec(name="far", hf="owner/repo"),
            ModelSpec(name="a", path=str(gone)),
            ModelSpec(name="b", path=str(model), projector=str(page), chat_template=str(tmp_path)),
            ModelSpec(name="elsewhere", path=str(gone), workers=0),
        )
    )
    with pytest.raises(ModelUnusable) as caught:
        Library(tmp_path / "hub").locate_all(found)
    assert str(caught.value).split("\n  ") == [
        "3 faults:",
        f"model a: no file {gone}; check the path",
        f"model b, projector: {page} is not a GGUF file (it begins with b'<htm'); convert it to GGUF",
        f"model b: chat_template: {tmp_path}: Is a directory; give a Jinja file",
    ]
    assert not (tmp_path / "hub").exists()


def test_a_missing_catalog_says_so(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="No such file"):
        wanted(SupervisorSettings(catalog=tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"PK\x03\x04" + bytes(40), "not a GGUF file"), (GGUF[:10], "cut off after 10 bytes"), (b"", "not a GGUF file")],
)
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelUnusable, match=said):
        check_gguf(path, "m")


@pytest.fixture(params=["a pipe", "a socket", "a device"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The path of something that is no file, and what it is."""
    kind: str = request.param
    path = tmp_path / "odd.gguf"
    with socket.socket(socket.AF_UNIX) as opened:
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a socket":
            opened.bind(str(path))
        else:
            path.symlink_to("/dev/zero")
        yield path, kind


@pytest.mark.timeout(10)
def test_what_is_no_file_is_refused_at_once(odd: tuple[Path, str], model: Path) -> None:
    """Opening a pipe waited for its other end: a supervisor that read its catalog hung there."""
    path, kind = odd
    with pytest.raises(ModelUnusable, match=f"model m: .*odd.gguf: it is {kind}, not a file; it must be a readable"):
        check_gguf(path, "m")
    with pytest.raises(ModelError, match=f"odd.gguf: it is {kind}, not a file; give the path"):
        read_header(path)
    library = Library(path.parent)
    for spec in (
        ModelSpec(name="m", path=str(path)),
        ModelSpec(name="m", path=str(model), projector=str(path)),
        ModelSpec(name="m", path=str(model), adapters=(AdapterSpec(name="a", path=str(path)),)),
        ModelSpec(name="m", path=str(model), chat_template=str(path)),
    ):
        with pytest.raises(ModelUnusable, match=f"it is {kind}, not a file"):
            library.locate_all(Catalog(models=(spec,)))
    with pytest.raises(TemplateFileUnusable, match=f"it is {kind}, not a file; give a Jinja file"):
        template_of(str(path))


def test_a_missing_or_odd_file(tmp_path: Path, model: Path) -> None:
    check_gguf(model, "m")
    with pytest.raises(ModelUnusable, match=r"model m: no file .*none\.gguf"):
        check_gguf(tmp_path / "none.gguf", "m")
    with pytest.raises(ModelUnusable, match="is a folder; name a GGUF file in it"):
        check_gguf(tmp_path, "m")
