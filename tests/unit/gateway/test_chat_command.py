"""`paddock chat`: on a pipe, in a terminal, and what it says when something is wrong."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any

import pytest

from gateway.commands import chat as chat_command
from gateway.commands.chat_history import LineEditor
from gateway.commands.target import address_file
from tests.support.scripted_server import Reply, ScriptedServer, scripted_server, stream
from tests.support.sent_media import PNG, data_url
from tests.support.stack import free_port

ROOT = Path(__file__).resolve().parents[3]
KEY = "pk-first"
MODELS = Reply(json.dumps({"object": "list", "data": [{"id": "small"}, {"id": "large"}]}).encode())
DONE = "data: [DONE]\n\n"

AS_A_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from gateway.cli import main
sys.exit(main())
"""
"""What comes in as Ctrl-C is a signal for the one whose terminal it is."""


def chunk(text: str, field: str = "content", **more: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {field: text}}], **more})}\n\n"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


@pytest.fixture
def state(tmp_path: Path, server: ScriptedServer) -> Path:
    """The state folder of a `paddock up` that runs."""
    (tmp_path / "run").mkdir()
    address_file(tmp_path).write_text(server.url + "\n")
    (tmp_path / "first-key").write_text(KEY + "\n")
    return tmp_path


@pytest.fixture
def chat(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs it with something on its standard input: exit code, what it printed, what it complained of."""

    def run(text: str, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = chat_command.main(["--state-dir", str(state), *flags])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


Chat = Callable[..., tuple[int, str, str]]


def test_a_pipe_gets_the_answer_and_nothing_else(server: ScriptedServer, chat: Chat) -> None:
    server.replies = [MODELS, stream(chunk("hm", "reasoning_content"), chunk("Hel"), chunk("lo"), DONE)]
    assert chat("Say\nhello.\n", "--system", "Be short.", "--max-tokens", "9", "--temperature", "0") == (
        0,
        "Hello\n",
        "",
    )
    assert server.asked[1].json == {
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say\nhello."}],
        "model": "small",
        "stream": True,
        "max_tokens": 9,
        "temperature": 0.0,
    }
    assert {asked.headers["authorization"] for asked in server.asked} == {f"Bearer {KEY}"}


def test_files_go_with_the_first_turn(server: ScriptedServer, chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "note.txt").write_text("a note")
    files = ("--file", str(tmp_path / "a.png"), "--file", str(tmp_path / "note.txt"))
    server.replies = [MODELS, stream(chunk("a cat"), DONE)]
    assert chat("What is it?", *files) == (0, "a cat\n", "")
    assert server.asked[1].json["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": data_url(PNG)}},
                {"type": "text", "text": "a note"},
                {"type": "text", "text": "What is it?"},
            ],
        }
    ]


def test_a_file_that_can_not_be_sent_is_named(server: ScriptedServer, chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\0")
    for path, said in (
        (str(tmp_path / "none.png"), "No such file"),
        (str(tmp_path / "a.bin"), "no text in UTF-8"),
        (str(tmp_path), "Is a directory"),
        ("~nobody-of-this-name/a.png", "home directory"),
    ):
        server.replies = [MODELS]
        code, _, complaint = chat("hi", "--file", path)
        assert code == 1
        assert said in complaint


def test_a_model_by_name(server: ScriptedServer, chat: Chat) -> None:
    server.replies = [MODELS, stream(chunk("x"), DONE)]
    assert chat("hi", "--model", "large")[0] == 0
    assert server.asked[1].json["model"] == "large"
    server.replies = [MODELS]
    assert chat("hi", "--model", "huge") == (1, "", "paddock: no model is called huge; there are: small, large\n")
    ranks = {"id": "ranks", "architecture": {"output_modalities": ["rerank"]}}
    asleep = {"id": "asleep", "status": {"value": "unloaded"}}
    awake = {"id": "awake", "architecture": {"output_modalities": ["text"]}, "status": {"value": "loaded"}}
    listed = Reply(json.dumps({"data": [ranks, asleep, awake]}).encode())
    server.replies = [listed, stream(chunk("x"), DONE)]
    assert chat("hi")[0] == 0
    assert server.asked[-1].json["model"] == "awake"
    server.replies = [Reply(b'{"data": []}')]
    assert chat("hi") == (1, "", "paddock: no model that talks is served there, or none that the key may use\n")


def test_the_key_of_this_machine_goes_to_no_other(server: ScriptedServer, chat: Chat) -> None:
    server.replies = [MODELS, stream(chunk("x"), DONE)]
    assert chat("hi", "--url", server.url.removeprefix("http://"))[0] == 0
    assert "authorization" not in server.asked[0].headers
    assert chat("hi", "--url", server.url, "--api-key", "theirs")[0] == 1
    assert server.asked[-1].headers["authorization"] == "Bearer theirs"


def test_what_is_wrong_is_one_line(server: ScriptedServer, chat: Chat, state: Path) -> None:
    server.replies = [Reply(b'{"error": {"message": "Who?", "type": "authentication_error"}}', 401)]
    assert chat("hi") == (1, "", f"paddock: Who? (the key came from {state / 'first-key'})\n")
    assert chat("hi", "--api-key", "x")[2] == "paddock: Who? (the key came from flag --api-key)\n"
    (state / "first-key").unlink()
    assert "(there is no key in" in chat("hi")[2]
    port = str(free_port())
    code, _, error = chat("hi", "--port", port)
    assert code == 1
    assert error.startswith(f"paddock: nothing answers at http://127.0.0.1:{port} (")
    assert error.endswith("start a gateway with `paddock up`, or name another with --url\n")
    server.replies = [MODELS]
    assert "nothing came in on standard input" in chat(" \n")[2]
    for flags, words in ((("--prot", "1"), "did you mean --prompt?"), (("--max-tokens", "x"), "--max-tokens")):
        code, _, error = chat("hi", *flags)
        assert (code, error.count("\n")) == (2, 1)
        assert words in error


@dataclass(slots=True)
class Screen:
    """A terminal with a chat in it; what it shows is in `text`."""

    process: subprocess.Popen[bytes]
    master: int
    text: str = ""

    def wait(self, words: str, timeout_s: float = 20.0) -> str:
        """What came until the words did."""
        begin, deadline = len(self.text), time.monotonic() + timeout_s
        while words not in self.text[begin:]:
            assert time.monotonic() < deadline, f"{words!r} did not come after {self.text!r}"
            if select([self.master], [], [], 0.1)[0]:
                self.text += os.read(self.master, 65536).decode()
        return self.text[begin:]

    def type(self, keys: str, words: str) -> str:
        os.write(self.master, keys.encode())
        return self.wait(words)


@pytest.fixture
def screen(state: Path, server: ScriptedServer) -> Iterator[Screen]:
    master, slave = pty.openpty()
    command = [sys.executable, "-c", AS_A_TERMINAL, "chat", "--state-dir", str(state)]
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    server.replies = [MODELS]
    yield Screen(process, master)
    process.kill()
    process.wait()
    os.close(master)


def test_a_chat_in_a_terminal(server: ScriptedServer, screen: Screen) -> None:
    assert f"small at {server.url}. /help" in screen.wait("> ")
    server.replies = [
        stream(
            chunk("hm", "reasoning_content"),
            chunk("He\x1b[31m"),
            chunk("llo", timings={"predicted_n": 2, "predicted_per_second": 50}),
            DONE,
        )
    ]
    shown = screen.type("hi\n", "> ")
    assert "\x1b[2mhm\x1b[0m\r\n\r\nHe[31mllo\r\n" in shown, "a thought is dimmed, and nobody else has colours"
    assert "2 tokens, 50.0 tokens/s" in shown
    server.streams(chunk("Once"), ending="open")
    screen.type("a story\n", "Once")
    assert "stopped" in screen.type("\x03", "> ")
    assert server.left.wait(5), "stopping ends the call"
    server.says({"error": {"message": "too busy", "type": "rate_limit_error"}}, status=429)
    assert "\x1b[31mtoo busy\x1b[0m" in screen.type("again\n", "> ")
    screen.type("half a line", "half a line")
    time.sleep(
        0.3
    )  # the prompt is there before input is read, and Python sees a Ctrl-C between the two at the next line
    screen.type("\x03", "> ")
    assert "Be kind." in screen.type("/system Be kind.\n", "> ")
    server.streams(chunk("ok"), DONE)
    screen.type(" /model is a word\n", "> ")
    assert [turn["content"] for turn in server.asked[-1].json["messages"]] == [
        *("Be kind.", "hi", "He\x1b[31mllo", "a story", "Once", "/model is a word")
    ]
    assert screen.process.poll() is None
    screen.type("\x04", "\n")
    assert screen.process.wait(10) == 0


def test_commands(server: ScriptedServer, screen: Screen) -> None:
    screen.wait("> ")
    assert "/clear" in screen.type("/help\n", "> ")
    listed = screen.type("/model\n", "> ")
    assert "* small" in listed
    assert "  large" in listed
    assert "no model is called huge" in screen.type("/model huge\n", "> ")
    screen.type("/model large\n", "> ")
    assert "/sytem: no such command" in screen.type("/sytem\n", "> ")
    assert "no instructions" in screen.type("/system\n", "> ")
    for _ in range(2):
        server.streams(chunk("ok"), DONE)
        screen.type("hi\n", "> ")
        assert server.asked[-1].json["model"] == "large"
        assert len(server.asked[-1].json["messages"]) == 1
        assert "forgotten" in screen.type("/clear\n", "> ")
    screen.type("/quit\n", "\n")
    assert screen.process.wait(10) == 0


def test_pasted_lines_are_one_turn(server: ScriptedServer, screen: Screen) -> None:
    screen.wait("> ")
    server.replies = [stream(chunk("ok"), DONE)]
    screen.type("\x1b[200~one\ntwo\x1b[201~", "two")
    screen.type("\n", "ok")
    assert server.asked[-1].json["messages"][-1] == {"role": "user", "content": "one\ntwo"}


def test_what_was_typed_is_there_the_next_time(server: ScriptedServer, screen: Screen, state: Path) -> None:
    screen.wait("> ")
    server.replies = [stream(chunk("ok"), DONE)]
    screen.type("a riddle\n", "> ")
    screen.type("\x04", "\n")
    assert screen.process.wait(10) == 0
    history = state / "chat-history"
    assert history.read_text().splitlines()[-1] == "a riddle"
    assert history.stat().st_mode & 0o777 == 0o600
    history.chmod(0o644)
    assert LineEditor(history).begin() == ""
    assert history.stat().st_mode & 0o777 == 0o600, "whoever made it"


def test_a_history_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    (tmp_path / "chat-history").mkdir()
    assert "what is typed is forgotten" in LineEditor(tmp_path / "chat-history").begin()


def test_markdown_is_shown_as_what_it_means(server: ScriptedServer, screen: Screen) -> None:
    screen.wait("> ")
    server.replies = [stream(chunk("## Foxes\n\n- a **quick** one"), chunk("\n- a red one\n"), DONE)]
    told = screen.type("list\n", "red one\r\n\x1b[?2004h> ")
    assert "\x1b[1mquick\x1b[0m" in told
    assert " • " in told
