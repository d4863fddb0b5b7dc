"""The processes in which a caller's long text may crash or hang llama.cpp's tokenizer (`workers.llama.tokenizer`).

    python -m workers.llama.token_process MODEL.gguf DESCRIPTOR

The first process loads the vocabulary and does nothing but fork others, which share its memory: each takes texts from
a socket of its own, and a new one is there within some milliseconds. It reads orders from the socket DESCRIPTOR until
that ends: `FORK` with a socket is answered with the child's process id, `END` with a process id with its exit code
(negative: the signal that ended it).
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import sys
import threading
from pathlib import Path

from workers.bounds import bound_cpu, bound_memory, shut_off
from workers.lifeline import end_with_parent
from workers.llama.token_floor import TokenFloor
from workers.llama.vocab import Vocab
from workers.llama.vocab_file import VocabFile

READY = b"+"
FORK, END = 1, 2
ORDER, REPLY = struct.Struct("=ii"), struct.Struct("=i")
"""An order: the order and a process id. Its reply: a process id or an exit code."""

TEXT, TOKENS = struct.Struct("=QiqBB"), struct.Struct("=qB")
"""A text: its bytes, seconds of processor time, most tokens allowed (or `ANY`), `add_special`, `parse_special`. Its
reply: the number of tokens (negative: at least so many, none follow), whether the process is to be replaced."""

ANY = -1

NOT_BEGUN, BROKEN = 75, 1
"""Exit codes: the process could not get what it needs to take texts; it broke down over one, or its worker has gone."""

STACK_BYTES = 192 << 20
"""Stack for the recursion of std::regex: 320 bytes for each character of a run, measured over all of llama.cpp's
pre-tokenizers. Pages are allocated when they are touched."""

EXTRA_BYTES = 384 << 20
"""Most memory beyond what the process takes itself."""

GROWN_BYTES = 48 << 20
"""Growth over a text after which a process is replaced, which frees the memory."""

SOCKET_BYTES = 1 << 20

NICENESS = 5
"""Niceness of the processes: where both want a processor, the engine's steps come before a text."""


def main(path: Path, descriptor: int) -> None:
    """Serve orders until the worker closes the socket or ends."""
    with socket.socket(fileno=descriptor) as orders, VocabFile.load(path) as file:
        children: set[int] = set()
        floor = TokenFloor.of(file)
        gc.freeze()  # so that memory shared with the children is not written to
        try:
            orders.sendall(READY)
            while _obey(orders, file.vocab, floor, children):
                pass
        finally:
            for pid in children:
                _ended(pid)


def _obey(orders: socket.socket, vocab: Vocab, floor: TokenFloor, children: set[int]) -> bool:
    """Carry out one order; return False where there are no more."""
    data, descriptors, _, _ = socket.recv_fds(orders, ORDER.size, 1)
    if len(data) < ORDER.size:
        return False
    order, pid = ORDER.unpack(data)
    if order == FORK:
        pid = os.fork()
        if pid == 0:
            _child(vocab, floor, orders, descriptors[0])
        os.close(descriptors[0])
        children.add(pid)
        orders.sendall(REPLY.pack(pid))
    elif order == END:
        orders.sendall(REPLY.pack(_ended(pid) if pid in children else -signal.SIGKILL))
        children.discard(pid)
    return True


def _ended(pid: int) -> int:
    """End a child and return its exit code. It may have ended: until it is waited for, its process id stays its own."""
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _child(vocab: Vocab, floor: TokenFloor, orders: socket.socket, descriptor: int) -> None:
    """Take texts in a child process. Never returns. The socket stays open until the end: when the worker sees it close,
    the exit code is settled, and a signal that comes then changes nothing.
    """
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
                texts.sendall(TOKENS.pack(-at_least, False))
                continue
            tokens = vocab.token_array(text, add_special=bool(add_special), parse_special=bool(parse_special))
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - quiet) << 10 > GROWN_BYTES
            texts.sendall(TOKENS.pack(len(tokens), grown))
            texts.sendall(tokens)


def read_exactly(source: socket.socket, num_bytes: int) -> bytearray:
    """Return so many bytes. Raises EOFError, and what the socket raises (TimeoutError where it has a timeout)."""
    data = bytearray(num_bytes)
    view, have = memoryview(data), 0
    while have < num_bytes:
        count = source.recv_into(view[have:])
        if not count:
            raise EOFError
        have += count
    return data


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
