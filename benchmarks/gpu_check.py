"""What the engine does on an NVIDIA GPU: builds llama.cpp for CUDA, measures, prints a table.

    python benchmarks/gpu_check.py                  on a bare machine: Python, a C++ compiler, the CUDA toolkit
    python benchmarks/gpu_check.py --device cpu     the same measurements with the demo model, small, on the CPU

The environment it makes lies in the benchmark folder (PADDOCK_BENCH_DIR, else `<user cache>/paddock/bench`), the
compiled wheel in the wheel cache of `make up`; the project's own `.venv` is left as it is. Without an NVIDIA GPU it
says so and exits 0. Standard library only: `benchmarks/gpu_rows.py`, which measures, runs in that environment.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = "no NVIDIA GPU here: nothing to measure"
CUDA = "-DGGML_CUDA=on"
QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
TOOLKITS = (Path("/usr/local/cuda/bin"), Path("/opt/cuda/bin"))


def gpus(environment: Mapping[str, str]) -> list[str]:
    """A line about each NVIDIA GPU; none where the driver's program is missing or finds none."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return []
    try:
        found = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip()] if found.returncode == 0 else []


def compiler(environment: Mapping[str, str]) -> str | None:
    """Path of CUDA's compiler."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    places = [environment.get("PATH", ""), *([Path(home, "bin")] if home else []), *TOOLKITS]
    return shutil.which("nvcc", path=os.pathsep.join(str(place) for place in places))


def bench_folder() -> Path:
    """The same as `benchmarks.reference.bench_dir`, which needs more than the standard library."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PADDOCK_BENCH_DIR") or cache / "paddock" / "bench")


def build(nvcc: str) -> Path:
    """Python of an environment whose llama.cpp runs on CUDA. Raises CalledProcessError; the reason is printed."""
    environment = {
        **os.environ,
        "PADDOCK_VENV": str(bench_folder() / "gpu-venv"),
        "CMAKE_ARGS": os.environ.get("CMAKE_ARGS") or CUDA,
        "CUDACXX": nvcc,
        "PATH": f"{Path(nvcc).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    subprocess.run([sys.executable, ROOT / "deploy" / "install.py", "--dev"], env=environment, check=True)
    return bench_folder() / "gpu-venv" / "bin" / "python"


def measure(python: Path, flags: list[str], device: str) -> int:
    """Runs the measurements with `python`; returns their exit code."""
    command = [str(python), "-m", "benchmarks.gpu_rows", "--device", device, *flags]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}).returncode


def own_python() -> Path:
    """The project's environment where it is made, else the Python that runs this."""
    made = ROOT / ".venv" / "bin" / "python"
    return made if made.exists() else Path(sys.executable)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--model", type=Path, help="GGUF file; a synthetic 0.5 B model, or on the CPU the demo")
    arguments = parser.parse_args()
    flags = ["--model", str(arguments.model.absolute())] if arguments.model else []
    if arguments.device == "cpu":
        return measure(own_python(), flags, "cpu")
    found = gpus(os.environ)
    if not found:
        print(NO_GPU)
        return 0
    nvcc = compiler(os.environ)
    if nvcc is None:
        print("gpu_check: no nvcc: install the CUDA toolkit and put its bin folder on PATH, or set CUDA_HOME")
        return 1
    print("\n".join([*found, f"{platform.platform()}, {os.cpu_count()} CPU threads"]), flush=True)
    try:
        python = build(nvcc)
    except subprocess.CalledProcessError as error:
        print(f"gpu_check: the build for CUDA failed ({error.returncode}), see above")
        return 1
    return measure(python, flags, "gpu")


if __name__ == "__main__":
    sys.exit(main())
