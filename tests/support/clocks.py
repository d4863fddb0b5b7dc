"""Clocks that a test sets: of Python processes, and of a Redis."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

_PYTHON = """
import os, struct, time
_true = time.time
_file = os.open(os.environ["TEST_CLOCK"], os.O_RDONLY)
time.time = lambda: _true() + struct.unpack("q", os.pread(_file, 8, 0))[0]
"""

_C = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static long long ahead(void) {
    static volatile long long *seconds;
    if (!seconds) {
        int file = open(getenv("TEST_CLOCK"), O_RDONLY);
        seconds = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    }
    return *seconds;
}
int gettimeofday(struct timeval *now, void *zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int result = real(now, zone);
    now->tv_sec += ahead();
    return result;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += ahead();
    return result;
}
time_t time(time_t *out) {
    struct timeval now;
    gettimeofday(&now, 0);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


class Clock:
    """The wall clock of the processes that are started under it; true until it is set. Monotonic clocks stay true."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = folder / f"{name}.clock"
        self._folder = folder
        self.set(0)

    def set(self, ahead_s: int) -> None:
        """From now on it is so many seconds ahead."""
        if self.file.exists():
            with self.file.open("r+b") as file:
                file.write(struct.pack("q", ahead_s))
        else:
            self.file.write_bytes(struct.pack("q", ahead_s))

    def of_python(self) -> Mapping[str, str]:
        """Environment of a Python process."""
        (self._folder / "sitecustomize.py").write_text(_PYTHON)
        return {"PYTHONPATH": str(self._folder), "TEST_CLOCK": str(self.file)}

    def of_any(self) -> Mapping[str, str]:
        """Environment of a dynamically linked program. Skips the test where there is no C compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("a C compiler is needed to set another program's clock")
        source, library = self._folder / "clock.c", self._folder / "clock.so"
        source.write_text(_C)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        return {"LD_PRELOAD": str(library), "TEST_CLOCK": str(self.file)}


@contextmanager
def under(environment: Mapping[str, str]) -> Iterator[None]:
    """What is started in the block has this environment too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield
