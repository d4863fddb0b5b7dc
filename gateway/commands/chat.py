"""`paddock chat`: talks to a model in the terminal, or answers what comes in on a pipe.

--model NAME          model, alias or adapter to talk to; default: the first chat model that is loaded
--prompt TEXT         prints the answer to this, and nothing else
--system TEXT         system prompt
--max-tokens N        maximum tokens of an answer
--temperature T       0 is greedy; default: the model's own
--file PATH           picture, sound or text that goes with the first turn; may be given several times
--url URL             another gateway, or a llama-server; its key is --api-key or PADDOCK_API_KEY
--insecure            do not check the certificate of an https address
--no-history          do not keep what is typed; else it is in `chat-history` in the state folder, for its owner only
flags                 where the local gateway is: --host, --port, --api-key, --state-dir, --config; default: that of
                      the last `paddock login`, else the gateway of `paddock up` on this machine, with the key in its
                      state folder

Ctrl-C stops the answer under way, Ctrl-D ends the program. Type /help for the commands within a chat.
"""

from __future__ import annotations

import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gateway.client import (
    AuthenticationFailed,
    Client,
    ClientError,
    ConnectionFailed,
    Message,
    Model,
    Part,
    Timings,
    file_part,
    text_part,
)
from gateway.commands.chat_history import FILE_NAME, LineEditor
from gateway.commands.chat_text import MarkdownBlocks, Words
from gateway.commands.logins import LoginsUnreadable
from gateway.commands.target import Access, find
from gateway.settings import GatewaySettings
from workers import sources
from workers.commands import command
from workers.protocol.exits import Exit

DIM, BOLD, RED, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"

CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters to remove from what a model writes, as they would control the terminal that shows it."""

HELP = """/help            this
/clear           forget the conversation
/system [TEXT]   show the instructions, or set them
/model [NAME]    list the models, or change to one
/file PATH       send a picture, a sound or a text with the next turn; /image is the same
/quit            leave, as Ctrl-D does
Ctrl-C stops an answer. A line that begins with a space is sent as it is."""


Turn = Message | dict[str, Any]


class ChatUnusable(ValueError):
    """The chat can't go on as asked; the message says why, for a person."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a streamed answer: of its text, or of the model's reasoning."""

    text: str
    is_thought: bool


class Conversation:
    """The turns of a conversation with a model. `parameters`: those of `chat.completions.create`."""

    def __init__(self, client: Client, model: str | None, system: str | None, parameters: Mapping[str, Any]) -> None:
        """Choose the model: `model`, or if None the first that is loaded and writes text. Raises ClientError,
        ChatUnusable."""
        self.system = system
        self.timings: Timings | None = None
        """The latest timings of the last answer; None: the server has sent none."""
        self._client = client
        self._parameters = parameters
        self._turns: list[Turn] = []
        self._files: list[Part] = []
        """The files that go with the next turn."""
        self.model = self._chosen(model)

    def models(self) -> tuple[Model, ...]:
        """Return the models that the server lists. Raises ClientError."""
        return self._client.models.list()

    def use(self, model: str) -> None:
        """Use another model for the next turns. Raises ClientError, ChatUnusable."""
        self.model = self._chosen(model)

    def clear(self) -> None:
        self._turns.clear()
        self._files.clear()

    def attach(self, path: Path) -> None:
        """Send a file with the next turn: a picture, a sound or a text. Raises ChatUnusable."""
        try:
            self._files.append(file_part(path.expanduser()))
        except (OSError, ValueError, RuntimeError) as error:  # the last: of a home that nobody has
            raise ChatUnusable(f"{path} can't be sent: {error}") from error

    def say(self, text: str) -> Generator[Piece]:
        """Send a turn and yield the answer in pieces. Raises ClientError.

        The conversation keeps both turns if the answer ends or the caller stops it, and neither if the answer fails."""
        self.timings = None
        said: list[str] = []
        turn: Turn = Message("user", text)
        if self._files:
            turn = {"role": "user", "content": [*self._files, text_part(text)]}
        turns = [*self._turns, turn]
        system = [Message("system", self.system)] if self.system else []
        stream = self._client.chat.completions.create(
            [*system, *turns], model=self.model, stream=True, **self._parameters
        )
        try:
            for chunk in stream:
                self.timings = chunk.timings or self.timings
                if chunk.reasoning:
                    yield Piece(chunk.reasoning, is_thought=True)
                if chunk.text:
                    said.append(chunk.text)
                    yield Piece(chunk.text, is_thought=False)
        except (GeneratorExit, KeyboardInterrupt):
            self._keep(turns, said)
            raise
        finally:
            stream.close()
        self._keep(turns, said)

    def _keep(self, turns: list[Turn], said: list[str]) -> None:
        """Keep the turns of the conversation with the answer, which took the files."""
        self._turns = [*turns, Message("assistant", "".join(said))]
        self._files.clear()

    def _chosen(self, name: str | None) -> str:
        models = self.models()
        if name in [model.id for model in models]:
            return name
        if name is not None:
            raise ChatUnusable(f"no model is called {name}; there are: {', '.join(model.id for model in models)}")
        talking = [model for model in models if _talks(model)]
        if not talking:
            raise ChatUnusable("no model that talks is served there, or none that the key may use")
        return min(talking, key=lambda model: not _is_loaded(model)).id


def _talks(model: Model) -> bool:
    """Return whether a model writes text; models for embeddings or ranking do not."""
    return model.architecture is None or "text" in model.architecture.output_modalities


def _is_loaded(model: Model) -> bool:
    return model.status is None or model.status.value == "loaded"


class Terminal:
    """Reads lines from standard input and writes to standard output, in colours on a terminal without NO_COLOR."""

    def __init__(self, history: Path | None = None) -> None:
        """`history`: file in which what is typed is kept; None: it is not kept."""
        self._editor = LineEditor(history)
        self._is_tty = sys.stdout.isatty()
        self._has_colours = self._is_tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def answer_once(self, conversation: Conversation, prompt: str) -> None:
        """Print the answer to one prompt, and nothing else. Raises ClientError, ChatUnusable."""
        if not prompt.strip():
            raise ChatUnusable("nothing came in on standard input; send a prompt, or run it in a terminal")
        with closing(conversation.say(prompt.strip())) as pieces:
            self._show(pieces)

    def talk(self, conversation: Conversation, address: str) -> None:
        """Read and answer lines until the person leaves."""
        if why := self._editor.begin():
            self._note(why)
        self._note(f"{conversation.model} at {address}. /help lists what can be typed, Ctrl-D leaves.")
        try:
            while (line := self._line()) is not None:
                if line.startswith("/"):
                    if not self._command(conversation, line):
                        return
                elif line.strip():
                    self._turn(conversation, line.strip())
        finally:
            self._editor.end()

    def _line(self) -> str | None:
        """Return the next line that the person types; None: the person leaves."""
        while True:
            try:
                return input("> ")
            except KeyboardInterrupt:
                print()
            except EOFError:
                print()
                return None

    def _turn(self, conversation: Conversation, text: str) -> None:
        try:
            with closing(conversation.say(text)) as pieces:
                self._show(pieces)
        except KeyboardInterrupt:
            self._note("\nstopped")
            return
        except ClientError as error:
            self._complain(error)
            return
        timings = conversation.timings
        if timings and timings.predicted_per_second:
            self._note(f"{timings.predicted_n} tokens, {timings.predicted_per_second:.1f} tokens/s")

    def _show(self, pieces: Iterator[Piece]) -> None:
        """Print an answer. Reasoning is shown, dimmed, on a terminal only; the answer's text begins on a new line."""
        thinking = said = False
        is_dumb = not self._is_tty or os.environ.get("TERM") == "dumb"
        size = shutil.get_terminal_size()
        words = Words(self._write, size.columns)
        blocks = MarkdownBlocks(self._write, size.columns, size.lines) if self._has_colours else None
        try:
            for piece in pieces:
                if piece.is_thought and not self._is_tty:
                    continue
                if piece.is_thought != thinking:
                    thinking = piece.is_thought
                    self._write(self._colour(DIM) if thinking else f"{self._colour(PLAIN)}\n\n")
                    words.begin_line()
                said = True
                if is_dumb:
                    self._write(piece.text.translate(CONTROLS) if self._is_tty else piece.text)
                elif blocks is None or piece.is_thought:
                    words.write(piece.text.translate(CONTROLS))
                else:
                    blocks.write(piece.text.translate(CONTROLS))
        finally:
            if thinking:
                self._write(self._colour(PLAIN))
            if blocks is not None:
                blocks.end()
        if said:
            self._write("\n")

    def _command(self, conversation: Conversation, line: str) -> bool:
        """Carry out a command such as /help. Return False if it ends the conversation."""
        name, _, rest = line.partition(" ")
        actions: dict[str, Callable[[Conversation, str], None]] = {
            "/help": lambda _, __: self._note(HELP),
            "/clear": self._clear,
            "/system": self._system,
            "/model": self._model,
            "/file": self._file,
            "/image": self._file,
        }
        if name in ("/quit", "/exit"):
            return False
        if name not in actions:
            self._complain(f"{name}: no such command; /help lists them, a space before it sends it to the model")
            return True
        try:
            actions[name](conversation, rest.strip())
        except (ClientError, ChatUnusable) as error:
            self._complain(error)
        return True

    def _clear(self, conversation: Conversation, _: str) -> None:
        conversation.clear()
        self._note("forgotten")

    def _system(self, conversation: Conversation, text: str) -> None:
        if text:
            conversation.system = text
        self._note(conversation.system or "no instructions; /system TEXT sets them")

    def _model(self, conversation: Conversation, name: str) -> None:
        if name:
            conversation.use(name)
            self._note(conversation.model)
            return
        for model in conversation.models():
            self._note(f"{'*' if model.id == conversation.model else ' '} {model.id}")

    def _file(self, conversation: Conversation, path: str) -> None:
        if not path:
            raise ChatUnusable("/file needs the path of a picture, a sound or a text")
        conversation.attach(Path(path))
        self._note("goes with the next turn")

    def _note(self, text: str) -> None:
        self._write(f"{self._colour(DIM)}{text}{self._colour(PLAIN)}\n")

    def _complain(self, error: ClientError | ChatUnusable | str) -> None:
        self._write(f"{self._colour(RED)}{error}{self._colour(PLAIN)}\n")

    def _colour(self, code: str) -> str:
        return code if self._has_colours else ""

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


FORM = "`paddock chat --help` lists the flags"


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ChatUnusable(f"chat: {message}; {FORM}")


def main(args: Sequence[str], known: Collection[str] = ()) -> int:
    """Run the command and return the exit code. `known`: the names of all settings."""
    if args and args[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    try:
        parser = make_parser()
        options, flags = parser.parse_known_args(args)
        beside = [one for action in parser._actions for one in action.option_strings]
        reading = sources.read(GatewaySettings, flags, prog="paddock chat", known=known, beside=beside)
        access = find(options.url, reading)
    except sources.SettingsError as error:
        return command.complain(error.problems)
    except (ChatUnusable, LoginsUnreadable) as error:
        return command.complain([str(error)])
    for warning in reading.warnings:
        print(f"paddock: warning: {warning}", file=sys.stderr)
    history = None if options.no_history else reading.settings.state_dir.expanduser() / FILE_NAME
    return _talk(options, access, history)


def run(args: Sequence[str], known: Collection[str] = ()) -> int:
    """Run `paddock run MODEL [PROMPT]`: a chat with this model, or its answer to a prompt; return the exit code."""
    if not args or args[0].startswith("-"):
        if args and args[0] in ("-h", "--help"):
            print(
                "`paddock run MODEL [PROMPT]`: `paddock chat --model MODEL`, or the answer to a prompt; flags as there."
            )
            return int(Exit.OK)
        return command.complain(["run: name a model; `paddock status` lists them"])
    model, *rest = args
    prompt = rest.pop(0) if rest and not rest[0].startswith("-") else None
    return main(["--model", model, *([] if prompt is None else ["--prompt", prompt]), *rest], known)


def _talk(options: Namespace, access: Access, history: Path | None) -> int:
    terminal = Terminal(history)
    parameters = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    try:
        with Client(access.url, access.key, verify_ssl=not options.insecure) as client:
            conversation = Conversation(client, options.model, options.system, parameters)
            for path in options.file:
                conversation.attach(path)
            if options.prompt is not None:
                terminal.answer_once(conversation, options.prompt)
            elif sys.stdin.isatty():
                terminal.talk(conversation, access.url)
            else:
                terminal.answer_once(conversation, sys.stdin.read())
    except AuthenticationFailed as error:
        return _fail(f"{error.message} ({access.key_from})")
    except ConnectionFailed as error:
        return _fail(f"{error}; start a gateway with `paddock up`, or name another with --url")
    except (ChatUnusable, ClientError) as error:
        return _fail(str(error))
    return int(Exit.OK)


def _fail(message: str) -> int:
    print(f"paddock: {message}", file=sys.stderr)
    return int(Exit.CRASHED)


def make_parser() -> ArgumentParser:
    """Return the parser of the flags that are no settings."""
    parser = _Parser(prog="paddock chat", allow_abbrev=False, add_help=False)
    parser.add_argument("--model")
    parser.add_argument("--prompt")
    parser.add_argument("--system")
    parser.add_argument("--url")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--file", type=Path, action="append", default=[])
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--no-history", action="store_true")
    return parser
