"""The processes in which a caller's long text may crash or hang llama.cpp's tokenizer (`tokenizer` is the other end).

    python -m workers.llama.tokens.token_process MODEL.gguf DESCRIPTOR OVERRIDES

OVERRIDES is a JSON object of metadata in place of the file's.

The first process loads the vocabulary and does nothing but fork others, which share its memory. A new one takes some
milliseconds; each takes texts from a socket of its own. The first process reads orders from the socket DESCRIPTOR until
that is closed. `FORK` comes with a socket for a new child; the reply is its process id. `END` comes with a process id;
the reply is that child's exit code (negative: the signal that ended it; `NO_MEMORY` if it said that as it ended).

Before anything is tokenised, `TokenFloor` refuses a text that is far too long for a context by its characters alone.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import string
import struct
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from llama_cpp import llama_cpp as c

from workers.llama.model_params import Overrides
from workers.llama.tokens.vocab import Vocab, VocabFile
from workers.process.limits import STDERR, bound_cpu, bound_memory, shut_off
from workers.process.parent_death import end_with_parent

SENTENCEPIECE, BYTE_PAIRS = 1, 2

OF_CHARACTERS = frozenset({"whitespace", "gemma4", "granite-embed-multi-311m", "sarvam-moe"})
"""Names of the byte-pair pre-tokenizers that work on characters, not on bytes."""

COUNTED = (
    bytes(range(0x21, 0x7F)),
    string.ascii_letters.encode(),
    string.digits.encode(),
)
"""Sets of characters, each counted separately: some tokens are a hundred punctuation marks, few have many letters."""

EVERY_BYTE = bytes(range(256))


class TokenFloor:
    """A lower bound on the tokens of a text for one vocabulary, found by counting the text's characters.

    A token stands for the characters of its own text and no others, so a text with a thousand letters has at least 1000
    / n tokens if no token has more than n letters. That holds for characters which no tokenizer drops or rewrites:

    - Sentencepiece (`llama`) and byte pairs of bytes (`gpt2`) keep every visible ASCII character. They may drop
      whitespace beside control tokens, and bytes beyond ASCII that a vocabulary lacks: neither is counted.
    - Wordpiece and unigram vocabularies rewrite the text first, and others are not known well enough: no bound.

    Source: `llama_vocab::impl::tokenize` and the sessions of src/llama-vocab.cpp of llama.cpp."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        """`texts`: texts of all tokens, as the vocabulary writes them; without any there is no bound."""
        longest_first = sorted(texts, key=len, reverse=True)
        known = {text for text in longest_first if len(text) == 1}
        self._most: list[tuple[bytes, int]] = []
        """For each set of `COUNTED`: all bytes that are not counted, and the maximum of counted bytes in one token."""
        for characters in COUNTED:
            kept = {character for character in characters if bytes((character,)) in known}
            others = bytes(set(EVERY_BYTE) - kept)
            most = 0
            for text in longest_first:
                if len(text) <= most:
                    break
                most = max(most, len(text.translate(None, others)))
            if most:
                self._most.append((others, most))

    @classmethod
    def of(cls, file: VocabFile) -> TokenFloor:
        """Return the bound for a file's vocabulary; takes some tenths of a second for 150,000 tokens."""
        pointer, kind, model = file.vocab.pointer, file.vocab.kind, file.text_of("tokenizer.ggml.model")
        of_bytes = kind == BYTE_PAIRS and model == "gpt2" and file.text_of("tokenizer.ggml.pre") not in OF_CHARACTERS
        if not of_bytes and (kind, model) != (SENTENCEPIECE, "llama"):
            return cls(())
        return cls(c.llama_vocab_get_text(pointer, token) for token in range(file.vocab.num_tokens))

    def of_text(self, data: bytes) -> int:
        """Return the minimum number of tokens that UTF-8 text can have; takes some milliseconds per MiB."""
        return max((-(-len(data.translate(None, others)) // most) for others, most in self._most), default=0)


READY = b"+"
FORK, END = 1, 2
ORDER, REPLY = struct.Struct("=ii"), struct.Struct("=i")
"""Format of an order: `FORK` or `END`, and a process id. Format of its reply: a process id or an exit code."""

TEXT, TOKENS = struct.Struct("=QiqBB"), struct.Struct("=qBB")
"""Format of a text's header: bytes, seconds of processor time, maximum tokens (or `ANY`), `add_special`,
`parse_special`. Format of the reply: number of tokens that follow, whether they were counted to the end, whether the
process must be replaced. A number -n means that the text has at least n tokens, which is more than the maximum, and
that no tokens follow: millions of them would be copied, and thrown away."""

ANY = -1

NOT_BEGUN, NO_MEMORY, BROKEN = 75, 76, 1
"""Exit codes of a process. `NOT_BEGUN`: it could not get what it needs to take texts. `NO_MEMORY`: a text needed more
than `EXTRA_BYTES`. `BROKEN`: it broke down over a text, or its worker has gone."""

SIGNS_OF_NO_MEMORY = (b"bad_alloc", b"MemoryError")
"""What C++ says, before it aborts, of memory that it could not get, and what Python does."""
SAID_BYTES = 64 << 10
"""Maximum bytes to read of what a process said; a pipe takes no more."""

STACK_BYTES = 192 << 20
"""Stack for the recursion of std::regex: 320 bytes for each character of a run, measured over all of llama.cpp's
pre-tokenizers. Pages are allocated when they are touched."""

EXTRA_BYTES = 384 << 20
"""Maximum bytes of memory beyond what the process has when it begins to take texts."""

GROWN_BYTES = 48 << 20
"""Bytes by which a process may grow. One that grew more is replaced after its text, which frees the memory."""

SOCKET_BYTES = 1 << 20

NICENESS = 5
"""Niceness of the tokenising processes: when processors are short, the engine's steps go first."""


def main(path: Path, descriptor: int, overrides: Overrides) -> None:
    """Serve orders until the worker closes the socket or ends."""
    with socket.socket(fileno=descriptor) as orders, VocabFile.load(path, overrides) as file:
        children: dict[int, int] = {}
        floor = TokenFloor.of(file)
        gc.freeze()  # so that memory shared with the children is not written to
        try:
            orders.sendall(READY)
            while _obey(orders, file.vocab, floor, children):
                pass
        finally:
            for pid, heard in children.items():
                _ended(pid, heard)


def _obey(orders: socket.socket, vocab: Vocab, floor: TokenFloor, children: dict[int, int]) -> bool:
    """Carry out the next order of the worker; return False if there are no more.

    `children`: process id -> descriptor on which the child's standard error is read."""
    data, descriptors, _, _ = socket.recv_fds(orders, ORDER.size, 1)
    if len(data) < ORDER.size:
        return False
    order, pid = ORDER.unpack(data)
    if order == FORK:
        heard, said = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # a child never waits for somebody to read it
        pid = os.fork()
        if pid == 0:
            os.dup2(said, STDERR)
            _child(vocab, floor, orders, descriptors[0])
        os.close(descriptors[0])
        os.close(said)
        children[pid] = heard
        orders.sendall(REPLY.pack(pid))
    elif order == END:
        orders.sendall(REPLY.pack(_ended(pid, children.pop(pid)) if pid in children else -signal.SIGKILL))
    return True


def _ended(pid: int, heard: int) -> int:
    """Kill a child if it still runs, and return its exit code. Before `waitpid` no other process can get its id.

    `heard`: descriptor on which the child's standard error is read; it is closed. All that C++ tells of a lack of
    memory is there: it aborts then, as it does for whatever else goes wrong."""
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    with open(heard, "rb", buffering=0) as pipe:
        told = (pipe.read(SAID_BYTES) or b"") if code in (BROKEN, -signal.SIGABRT) else b""
    return NO_MEMORY if any(sign in told for sign in SIGNS_OF_NO_MEMORY) else code


def _child(vocab: Vocab, floor: TokenFloor, orders: socket.socket, descriptor: int) -> None:
    """Take texts in a child process. Never returns. The socket stays open until the process exits, so when the worker
    sees it close, the exit code is final: killing the process (`END`) after that does not change the code."""
    code = NOT_BEGUN
    try:
        end_with_parent()
        os.nice(NICENESS)
        orders.close()
        threading.stack_size(STACK_BYTES)
        texts = socket.socket(fileno=descriptor)
        thread = threading.Thread(target=_serve, args=(vocab, floor, texts), daemon=True)
        thread.start()
        code = BROKEN
        thread.join()
    finally:
        os._exit(code)


def _serve(vocab: Vocab, floor: TokenFloor, texts: socket.socket) -> None:
    bound_memory(EXTRA_BYTES)
    shut_off()
    quiet = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(EOFError, OSError):  # the worker has gone
        while True:
            num_bytes, cpu_s, most, add_special, parse_special = TEXT.unpack(read_exactly(texts, TEXT.size))
            bound_cpu(cpu_s)
            text = bytes(read_exactly(texts, num_bytes))
            if most != ANY and (at_least := floor.of_text(text)) > most:
                texts.sendall(TOKENS.pack(-at_least, False, False))
                continue
            tokens = vocab.token_array(text, add_special=bool(add_special), parse_special=bool(parse_special))
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - quiet) << 10 > GROWN_BYTES
            if most != ANY and len(tokens) > most:
                texts.sendall(TOKENS.pack(-len(tokens), True, grown))
                continue
            texts.sendall(TOKENS.pack(len(tokens), True, grown))
            texts.sendall(tokens)


def read_exactly(source: socket.socket, num_bytes: int) -> bytearray:
    """Return `num_bytes` bytes read from the socket. Raises EOFError, and what the socket raises (TimeoutError)."""
    data = bytearray(num_bytes)
    view, have = memoryview(data), 0
    while have < num_bytes:
        count = source.recv_into(view[have:])
        if not count:
            raise EOFError
        have += count
    return data


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
