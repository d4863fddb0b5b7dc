"""Where settings come from, in which order, and what is said of those that can't be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.commands import config
from gateway.settings import GatewaySettings, UpSettings, known_settings
from workers import sources
from workers.settings import WorkerSettings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PADDOCK_STATE_DIR", str(tmp_path))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, dict[str, object]]:
    assert config.main(["show", "--json", *args]) == 0
    document: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)
    return document


def problems(*args: str) -> list[str]:
    with pytest.raises(sources.SettingsError) as caught:
        sources.read(UpSettings, args, known=known_settings())
    return list(caught.value.problems)


def test_flag_beats_variable_beats_file_beats_default(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / "config.yaml"
    file.write_text("port: 1\nslots: 2\nworkers: 3\n")
    monkeypatch.setenv("PADDOCK_PORT", "10")
    monkeypatch.setenv("PADDOCK_SLOTS", "20")
    monkeypatch.setenv("PADDOCK_ALIAS", "")
    values = shown(capsys, "--port", "100")
    assert values["port"] == {"value": 100, "source": "flag --port"}
    assert values["slots"] == {"value": 20, "source": "env PADDOCK_SLOTS"}
    assert values["workers"] == {"value": 3, "source": f"file {file}"}
    assert values["ctx"] == {"value": 0, "source": "default"}
    assert values["alias"] == {"value": "", "source": "default"}
    assert set(values) == set(UpSettings.model_fields)


def test_show_covers_secrets(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PADDOCK_API_KEY", "pk-hidden")
    monkeypatch.setenv("PADDOCK_WORKER_SECRET", "hidden-too")
    monkeypatch.setenv("PADDOCK_REDIS_URL", "redis://me:hidden@host:1/0")
    monkeypatch.setenv("PADDOCK_WORKER_REDIS_URL", "redis://you:hidden@host:1/0")
    assert config.main(["show"]) == 0
    text = capsys.readouterr().out
    assert "hidden" not in text
    assert "redis://me:********@host:1/0" in text
    assert "redis://you:********@host:1/0" in text
    assert "env PADDOCK_API_KEY" in text


def test_the_file_may_be_named_and_its_paths_are_beside_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "sub").mkdir()
    file = home / "sub" / "mine.yaml"
    file.write_text("model: m.gguf\nllama: {n_batch: 64}\n")
    assert shown(capsys, "--config", str(file))["model"]["value"] == str(home / "sub" / "m.gguf")
    monkeypatch.setenv("PADDOCK_CONFIG", str(file))
    values = shown(capsys)
    assert values["llama"] == {"value": '{"n_batch":64}', "source": f"file {file}"}


def test_bad_values_are_one_line_each(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "config.yaml").write_text("workers: 300\n")
    monkeypatch.setenv("PADDOCK_SLOTS", "many")
    lines = problems("--port", "99999", "--log-level", "loud", "--drain-s", "-1")
    assert sorted(lines) == [
        "drain_s: '-1' is not a number of at least 0 (from flag --drain-s); change the flag",
        "log_level: 'loud' is not one of debug, info, warning, error (from flag --log-level); change the flag",
        "port: '99999' is not a whole number from 0 to 65535 (from flag --port); change the flag",
        "slots: 'many' is not a whole number from 1 to 254 (from env PADDOCK_SLOTS); change it there, or give --slots",
        f"workers: 300 is not a whole number from 1 to 256 (from file {home / 'config.yaml'}); "
        "change it there, or give --workers",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1\n", "no such setting (did you mean port?)"),
        ("- port\n", "must hold lines `setting: value`, not a list"),
        ("port: [1\n", "not valid YAML"),
    ],
)
def test_a_bad_file_is_named(home: Path, text: str, said: str) -> None:
    file = home / "config.yaml"
    file.write_text(text)
    (line,) = problems()
    assert str(file) in line
    assert said in line


def test_a_named_file_must_be_there(home: Path) -> None:
    assert "No such file" in problems("--config", str(home / "none.yaml"))[0]


def test_a_switch_that_stands_alone_is_on(home: Path) -> None:
    for words, wanted in (
        (["--open"], (True, True)),
        (["--open", "--console", "false"], (True, False)),
        (["--console", "false", "--open", "--port", "1"], (True, False)),
        (["--open", "false"], (False, True)),
    ):
        found = sources.read(GatewaySettings, words).settings
        assert (found.open, found.console) == wanted, words


def test_unknown_flags_name_the_nearest(home: Path) -> None:
    assert "(did you mean --workers?)" in problems("--worker", "2")[0]


def test_unknown_variables_are_told_and_service_links_are_not(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_SLOTZ", "1")
    monkeypatch.setenv("PADDOCK_GATEWAY_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("PADDOCK_GATEWAY_PORT_8080_TCP_ADDR", "10.0.0.1")
    monkeypatch.setenv("PADDOCK_WORKER_PORT", "0")
    reading = sources.read(UpSettings, [], known=known_settings())
    assert reading.warnings == ("PADDOCK_SLOTZ: no such setting (did you mean PADDOCK_SLOTS?); it is ignored",)


def test_a_service_link_in_place_of_the_port_is_explained(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_PORT", "tcp://10.0.0.1:8080")
    assert "enableServiceLinks: false" in problems()[0]


def test_a_child_reads_what_its_parent_had(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = WorkerSettings.model_construct(alias="a", slots=3, ctx=0, worker_address="")
    inherited = {
        "PADDOCK_SLOTS": "9",
        "PADDOCK_GATEWAY_GRACE_S": "2",
        "PADDOCK_WORKER_ADDRESS": "http://x",
        "PATH": "p",
    }
    assert sources.environment_of(given, inherited) == {
        "PADDOCK_ALIAS": "a",
        "PADDOCK_SLOTS": "3",
        "PADDOCK_CTX": "0",
        "PADDOCK_GATEWAY_GRACE_S": "2",
        "PATH": "p",
    }
