"""Whether this compiler and this machine can be trusted with AMX, the processor's tile instructions.

GCC 12 drops the stores that fill a tile configuration before `ldtilecfg` reads it (its `_tile_loadconfig` names eight
bytes of the sixty-four as read), so llama.cpp built by it dies on the first batch of quantised weights. A virtual
machine may also show the instructions and refuse them. Both are found by trying, which takes half a second.

    python3 deploy/tiles.py     the variables to build with, as JSON
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

WITHOUT = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"

TRIAL_TIMEOUT_S = 60.0

PROGRAM = r"""
#include <stdint.h>
#include <string.h>
#if defined(__AMX_TILE__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
struct config { uint8_t palette, start_row, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; };
__attribute__((noinline)) void configure(int rows) {
    struct config wanted __attribute__((aligned(64))) = {0};
    wanted.palette = 1;
    for (int tile = 0; tile < 8; tile++) { wanted.rows[tile] = rows; wanted.bytes[tile] = 64; }
    _tile_loadconfig(&wanted);
}
int main(int count, char **words) {
    struct config set __attribute__((aligned(64)));
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 0; /* llama.cpp leaves tiles alone then */
    configure(count + 7);
    memset(&set, 0, sizeof set);
    __asm__ volatile("sttilecfg %0" : "=m"(set));
    for (int tile = 0; tile < 8; tile++) if (set.rows[tile] != count + 7 || set.bytes[tile] != 64) return 1;
    return 0;
}
#else
int main(void) { return 0; }
#endif
"""


def tiles_are_sound() -> bool:
    """False: the compiler would use tiles and what it makes does not run. Where nothing can be tried, true."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    flags = shlex.split(os.environ.get("CFLAGS", ""))
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "tiles.c"), Path(folder, "tiles")
        source.write_text(PROGRAM)
        try:
            made = subprocess.run(
                [*compiler, *flags, "-O3", "-march=native", str(source), "-o", str(program)],
                capture_output=True,
                timeout=TRIAL_TIMEOUT_S,
            )
            if made.returncode != 0:
                return True
            return subprocess.run([program], capture_output=True, timeout=TRIAL_TIMEOUT_S).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return True


def build_environment() -> dict[str, str]:
    """CFLAGS and CXXFLAGS as llama.cpp is to be built with here; empty: as they are."""
    if tiles_are_sound():
        return {}
    return {name: f"{os.environ.get(name, '')} {WITHOUT}".strip() for name in ("CFLAGS", "CXXFLAGS")}


if __name__ == "__main__":
    print(json.dumps(build_environment()))
