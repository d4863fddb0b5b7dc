"""The C++ llama-server that Paddock is measured against, built from the source that the llama-cpp-python sdist carries.

Same version, same sources, same machine as the worker's library. Everything lands in the benchmark folder
(`PADDOCK_BENCH_DIR`, else `<user cache>/paddock/bench`), never in the project's tree; the build takes about five
minutes on two cores and happens once per version.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def bench_dir() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = Path(os.environ.get("PADDOCK_BENCH_DIR", cache / "paddock" / "bench"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _tool(name: str) -> str:
    """A build tool of this environment (cmake and ninja come as wheels)."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def sdist_source() -> Path:
    """Unpacked sdist of the installed llama-cpp-python version; its `vendor/llama.cpp` is the C++ source."""
    version = importlib.metadata.version("llama-cpp-python")
    root = bench_dir() / "src" / f"llama_cpp_python-{version}"
    if (root / "vendor" / "llama.cpp" / "CMakeLists.txt").exists():
        return root
    download = bench_dir() / "sdist"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    subprocess.run(
        [*command, "--no-binary", "llama-cpp-python", f"llama-cpp-python=={version}", "-d", str(download)],
        check=True,
        env=environment,
    )
    (archive,) = download.glob(f"llama_cpp_python-{version}.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(bench_dir() / "src", filter="data")
    return root


def llama_server() -> Path:
    """The llama-server binary, built on first use with the options the worker's library is built with."""
    source = sdist_source() / "vendor" / "llama.cpp"
    flags = _build_flags()
    kind = "-no-tiles" if flags else ""
    build = bench_dir() / f"build-{importlib.metadata.version('llama-cpp-python')}{kind}"
    binary = build / "bin" / "llama-server"
    if binary.exists():
        return binary
    print("building llama-server from the llama-cpp-python sdist; this takes about five minutes once", flush=True)
    began = time.monotonic()
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
    ninja = f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}"
    subprocess.run(
        [_tool("cmake"), "-S", source, "-B", build, "-G", "Ninja", ninja, *options], check=True, env=os.environ | flags
    )
    subprocess.run([_tool("cmake"), "--build", build, "--target", "llama-server"], check=True)
    print(f"built in {time.monotonic() - began:.0f} s", flush=True)
    return binary


def _engine_wheel() -> Path | None:
    """What `deploy/install.py` installed into this environment."""
    try:
        wheel = Path(json.loads(Path(sys.prefix, "paddock-install.json").read_text())["engine"])
    except (OSError, ValueError, KeyError):
        return None
    return wheel if wheel.is_file() else None


def _build_flags() -> dict[str, str]:
    """Variables that the worker's library was built with on this machine (deploy/tiles.py)."""
    told = subprocess.run([sys.executable, ROOT / "deploy" / "tiles.py"], check=True, capture_output=True)
    flags: dict[str, str] = json.loads(told.stdout)
    return flags


def python_server() -> Path:
    """A Python that can run `-m llama_cpp.server`, made on first use.

    An environment of the benchmark's own: the server's extras, and the llama-cpp-python wheel that the project's
    environment was made with, where it is still there (else pip compiles it again).
    """
    version = importlib.metadata.version("llama-cpp-python")
    folder = bench_dir() / f"python-server-{version}"
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    print("installing llama_cpp.server and what it needs, once", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    wheel = _engine_wheel()
    wanted = f"llama-cpp-python[server] @ {wheel.as_uri()}" if wheel else f"llama-cpp-python[server]=={version}"
    subprocess.run([python, "-m", "pip", "install", "-q", wanted], check=True, env=os.environ | _build_flags())
    (folder / "ready").touch()
    return python


if __name__ == "__main__":
    print(llama_server())
