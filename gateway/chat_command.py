"""`paddock chat`: talk to a model in the terminal, or answer what comes in on a pipe.

--model NAME          model, alias or adapter; left out: the first one that is loaded and talks
--system TEXT         instructions that stand before the conversation
--max-tokens N        longest answer
--temperature T       0 is greedy; left out: the model's default
--url URL             a gateway elsewhere, or a llama-server; its key is --api-key or PADDOCK_API_KEY
--insecure            do not check the certificate of an https address
flags                 where the local gateway is: --host, --port, --api-key, --state-dir, --config; left out: the one
                      that `paddock up` runs here, and the key in its state folder

While it answers, Ctrl-C stops the answer; Ctrl-D leaves. /help lists what else can be typed.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from typing import NoReturn

from gateway.chat_terminal import ChatUnusable, Conversation, Terminal
from gateway.client import AuthenticationFailed, Client, ClientError, ConnectionFailed
from gateway.reach import Access, find
from gateway.settings import GatewaySettings
from workers import command, sources
from workers.protocol.exits import Exit

FORM = "`paddock chat --help` lists the flags"


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ChatUnusable(f"chat: {message}; {FORM}")


def main(args: Sequence[str], known: Collection[str] = ()) -> int:
    """Returns the exit code. `known`: every setting's name."""
    if args and args[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    try:
        options, flags = _parser().parse_known_args(args)
        reading = sources.read(GatewaySettings, flags, prog="paddock chat", known=known)
    except sources.SettingsError as error:
        return command.complain(error.problems)
    except ChatUnusable as error:
        return command.complain([str(error)])
    for warning in reading.warnings:
        print(f"paddock: warning: {warning}", file=sys.stderr)
    return _talk(options, find(options.url, reading))


def _talk(options: Namespace, access: Access) -> int:
    terminal = Terminal()
    parameters = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    try:
        with Client(access.url, access.key, verify_ssl=not options.insecure) as client:
            conversation = Conversation(client, options.model, options.system, parameters)
            if sys.stdin.isatty():
                terminal.talk(conversation, access.url)
            else:
                terminal.answer_once(conversation, sys.stdin.read())
    except AuthenticationFailed as error:
        return _failed(f"{error.message} ({access.key_from})")
    except ConnectionFailed as error:
        return _failed(f"{error}; start a gateway with `paddock up`, or name another with --url")
    except (ChatUnusable, ClientError) as error:
        return _failed(str(error))
    return int(Exit.OK)


def _failed(message: str) -> int:
    print(f"paddock: {message}", file=sys.stderr)
    return int(Exit.CRASHED)


def _parser() -> _Parser:
    parser = _Parser(prog="paddock chat", allow_abbrev=False, add_help=False)
    parser.add_argument("--model")
    parser.add_argument("--system")
    parser.add_argument("--url")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--insecure", action="store_true")
    return parser
