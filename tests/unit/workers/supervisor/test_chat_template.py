"""A catalog's chat template on its way to a worker: a file, or the template itself."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from workers.chat.conversation import Conversation
from workers.chat.named_templates import NAMED
from workers.chat.template import ChatTemplate
from workers.models.catalog import CatalogError
from workers.models.library import wanted
from workers.models.spec import TEMPLATE_NAMES, ModelSpec
from workers.protocol.requests import Message
from workers.served_text import MAX_TEMPLATE_BYTES, TemplateFileUnusable, template_of
from workers.settings import SupervisorSettings, WorkerSettings
from workers.supervisor.plan import plan
from workers.supervisor.supervisor import recipe, write_specs
from workers.worker import spec_of

INLINE = "{% for message in messages %}\n{{ message.content }} 'Grüße'\n{% endfor %}"


def worker_of(settings: SupervisorSettings, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """Return what the first worker is told of its model, by its environment and its file."""
    own = Path(tempfile.mkdtemp())  # other tests beside this one write files of the same names to the default folder
    settings = settings.model_copy(update={"redis_url": "unix:///r.sock", "worker_secret": "hush", "state_dir": own})
    [worker] = plan(wanted(settings).models, 4, (), "h")[:1]
    (settings.state_dir / "run").mkdir(parents=True, exist_ok=True)
    write_specs([worker], settings)
    for name, value in recipe(worker, settings, {}).environment.items():
        monkeypatch.setenv(name, value)
    return spec_of(WorkerSettings())


def catalog(tmp_path: Path, template: str) -> SupervisorSettings:
    file = tmp_path / "catalog.yaml"
    lines = "\n".join(f"      {line}" for line in template.splitlines())
    file.write_text(f"models:\n  - name: m\n    path: model.gguf\n    chat_template: |-\n{lines}\n")
    return SupervisorSettings(catalog=file)


def test_a_file_is_relative_to_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chat.jinja").write_text(INLINE)
    worker = worker_of(catalog(tmp_path, "chat.jinja"), monkeypatch)
    assert worker.chat_template == str(tmp_path / "chat.jinja")
    assert template_of(worker.chat_template) == INLINE


def test_a_template_in_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert template_of(worker_of(catalog(tmp_path, INLINE), monkeypatch).chat_template) == INLINE


def test_a_template_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_of(SupervisorSettings(chat_template=INLINE), monkeypatch).chat_template == INLINE


@pytest.mark.parametrize("name", ["llama3", "llama-3"])
def test_a_name_that_llama_server_or_llama_cpp_python_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands for a template that is built in, whatever folder the catalog lies in."""
    worker = worker_of(catalog(tmp_path, name), monkeypatch)
    assert worker.chat_template == name
    prompt = ChatTemplate(template_of(worker.chat_template)).render(Conversation(messages=(Message("user", " Hi "),)))
    turn = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert prompt == turn.format("user") + "Hi<|eot_id|>" + turn.format("assistant")
    assert set(NAMED) == TEMPLATE_NAMES


def test_one_that_is_too_long_for_the_catalog(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="length <= 32768"):
        wanted(catalog(tmp_path, "{{ x }}" + "x" * 32768))


def test_with_a_catalog_it_is_said_there(tmp_path: Path) -> None:
    settings = SupervisorSettings(catalog=catalog(tmp_path, INLINE).catalog, chat_template="x.jinja")
    with pytest.raises(CatalogError, match="say this per model"):
        wanted(settings)


@pytest.mark.parametrize(("written", "mode"), [("on", "on"), ("off", "off"), ("auto", "auto"), ('"off"', "off")])
def test_thinking_and_variables_on_their_way_to_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, mode: str
) -> None:
    """YAML takes a bare on for true."""
    file = tmp_path / "catalog.yaml"
    entry = f"  - name: m\n    path: model.gguf\n    thinking: {written}\n    chat_template_kwargs: {{colour: red}}\n"
    file.write_text(f"models:\n{entry}")
    worker = worker_of(SupervisorSettings(catalog=file), monkeypatch)
    assert (worker.thinking_mode, worker.chat_template_kwargs) == (mode, {"colour": "red"})
    config = tmp_path / "config.yaml"
    config.write_text(f"thinking: {written}\nchat_template_kwargs: {{colour: blue}}\n")
    for name in ("PADDOCK_THINKING", "PADDOCK_CHAT_TEMPLATE_KWARGS"):
        monkeypatch.delenv(name, raising=False)
    worker = worker_of(SupervisorSettings(config=config), monkeypatch)
    assert (worker.thinking_mode, worker.chat_template_kwargs) == (mode, {"colour": "blue"})


def test_a_budget_of_thought_and_its_message_on_their_way_to_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whitespace and quotation marks are part of the message."""
    message = ' ... "Enough",\nnow: {go}\n'
    written = json.dumps(message)
    file = tmp_path / "catalog.yaml"
    entry = f"  - name: m\n    path: model.gguf\n    thinking_budget: 40\n    thinking_budget_message: {written}\n"
    file.write_text(f"models:\n{entry}")
    worker = worker_of(SupervisorSettings(catalog=file), monkeypatch)
    assert (worker.thinking_budget, worker.thinking_budget_message) == (40, message)
    config = tmp_path / "config.yaml"
    config.write_text(f"thinking_budget: 0\nthinking_budget_message: {written}\n")
    for name in ("PADDOCK_THINKING_BUDGET", "PADDOCK_THINKING_BUDGET_MESSAGE"):
        monkeypatch.delenv(name, raising=False)
    worker = worker_of(SupervisorSettings(config=config), monkeypatch)
    assert (worker.thinking_budget, worker.thinking_budget_message) == (0, message)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("thinking: maybe", "thinking"),
        ("thinking_budget: -2", "thinking_budget"),
        (f"thinking_budget_message: {'x' * 4097}", "thinking_budget_message"),
        ("chat_template_kwargs: {messages: []}", "'messages' is a request's to set"),
        ("chat_template_kwargs: {add_generation_prompt: true}", "'add_generation_prompt' is a request's"),
        ("chat_template_kwargs: {enable_thinking: sure}", "'enable_thinking' must be true or false"),
    ],
)
def test_variables_that_no_model_can_have(tmp_path: Path, entry: str, told: str) -> None:
    file = tmp_path / "catalog.yaml"
    file.write_text(f"models:\n  - name: m\n    path: model.gguf\n    {entry}\n")
    with pytest.raises(CatalogError, match=told):
        wanted(SupervisorSettings(catalog=file))


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(TemplateFileUnusable, match=r"can't read .*gone\.jinja: No such file"):
        template_of(str(tmp_path / "gone.jinja"))
    (tmp_path / "latin.jinja").write_bytes(b"\xfc")
    with pytest.raises(TemplateFileUnusable, match="not UTF-8"):
        template_of(str(tmp_path / "latin.jinja"))
    (tmp_path / "long.jinja").write_bytes(b" " * (MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(TemplateFileUnusable, match=str(MAX_TEMPLATE_BYTES)):
        template_of(str(tmp_path / "long.jinja"))
