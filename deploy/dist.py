"""Builds a release into a folder: the wheel, the source archive, the chart and, where that can be, images and the wheel
of llama-cpp-python for machines like this one. `make dist` runs it.

    python deploy/dist.py [FOLDER]

What this machine has no program for is left out, and told. `SHA256SUMS` lists what was made. The wheel needs no
compiler: `pip install 'paddock-0.1.0-py3-none-any.whl[gateway]'` is a gateway, without llama.cpp.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ("accounts", "gateway", "worker")
BUILDERS = ("docker", "podman")
SUMS = "SHA256SUMS"
FIXED_TIME = {"SOURCE_DATE_EPOCH": "1580601600"}
"""Files of an archive get this time, so that the same sources make the same bytes."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="deploy/dist.py", description="Builds a release.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    folder: Path = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for build in (build_packages, pack_chart, copy_llama_wheel, save_images):
        for line in build(folder):
            print(f"dist: {line}", flush=True)
    write_sums(folder)
    print(f"dist: {folder / SUMS}")
    return 0


def build_packages(folder: Path) -> Iterator[str]:
    """Build the wheel and the source archive."""
    run(sys.executable, "-m", "hatchling", "build", "-d", str(folder))
    yield from (path.name for path in sorted([*folder.glob("paddock-*.whl"), *folder.glob("paddock-*.tar.gz")]))


def pack_chart(folder: Path) -> Iterator[str]:
    """Pack the Helm chart, as an OCI registry takes it (`helm push`)."""
    if (helm := shutil.which("helm")) is None:
        yield "no helm on this machine: the chart is left out"
        return
    run(helm, "package", "helm", "--destination", str(folder))
    yield from (path.name for path in sorted(folder.glob("paddock-*.tgz")))


def copy_llama_wheel(folder: Path) -> Iterator[str]:
    """Copy llama-cpp-python's wheel as `make up` has built it: workers on like machines need no compiler with it."""
    cache = Path(os.environ.get("PADDOCK_WHEEL_CACHE") or Path.home() / ".cache" / "paddock" / "wheels")
    wheels = sorted(cache.rglob("llama_cpp_python-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        yield "no wheel of llama-cpp-python is built here: it is left out (`make up` builds one)"
        return
    shutil.copy2(wheels[-1], folder)
    yield f"{wheels[-1].name} (for machines like this one)"


def save_images(folder: Path) -> Iterator[str]:
    """Save the images of this version that a container engine has."""
    builder = next((found for name in BUILDERS if (found := shutil.which(name))), None)
    if builder is None:
        yield f"none of {', '.join(BUILDERS)} on this machine: images are left out"
        return
    version = next(folder.glob("paddock-*.whl")).name.split("-")[1]
    for name in IMAGES:
        tag, file = f"paddock-{name}:{version}", folder / f"paddock-{name}-{version}.tar"
        if subprocess.run([builder, "image", "inspect", tag], capture_output=True).returncode != 0:
            yield f"there is no image {tag}: it is left out (`make images` builds it)"
            continue
        run(builder, "save", "--output", str(file), tag)
        yield file.name


def write_sums(folder: Path) -> None:
    """Write the SHA-256 of each file, as `sha256sum --check` reads it."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / SUMS).write_text("".join(lines))


def run(*command: str) -> None:
    """Run a command at the root of the checkout. Raises SystemExit with what it said if it fails."""
    done = subprocess.run(command, cwd=ROOT, env=os.environ | FIXED_TIME, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"dist: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
