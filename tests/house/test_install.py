"""deploy/install.py, as far as it goes without a network: what it reads, when it works, what it says."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "requirements"


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paddock_install", ROOT / "deploy" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "deploy"))  # where it runs as a script, its folder is searched
    spec.loader.exec_module(module)
    return module


def test_every_package_of_a_lock_is_read_with_its_hashes(install: ModuleType) -> None:
    for lock in LOCKS.glob("*.lock"):
        entries = list(install.requirements(lock))
        assert "".join(text for _, text in entries) == lock.read_text()
        assert all("--hash=sha256:" in text for _, text in entries)
    for package in (install.ENGINE, install.PRIVATE_REDIS):
        assert install.entry_of(LOCKS / "run.lock", package).startswith(f"{package}==")


def test_the_locks_agree(install: ModuleType) -> None:
    run, dev = (set(install.requirements(LOCKS / name)) for name in ("run.lock", "dev.lock"))
    assert run <= dev


def test_a_build_is_kept_under_all_that_shapes_it(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = install.entry_of(LOCKS / "run.lock", install.ENGINE)
    keys = {install.engine_key(entry), install.engine_key(entry.replace("0.3.", "0.4."))}
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    keys.add(install.engine_key(entry))
    monkeypatch.setenv("CXX", "clang++")
    keys.add(install.engine_key(entry))
    assert len(keys) == 4
    assert install.engine_key(entry) in keys


def test_the_cache_lies_outside_of_the_checkout(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert install.wheel_cache() == tmp_path / "paddock" / "wheels"
    monkeypatch.setenv("PADDOCK_WHEEL_CACHE", str(tmp_path / "mine"))
    assert install.wheel_cache() == tmp_path / "mine"


def test_a_missing_compiler_names_the_package(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(install.InstallError, match=r"no C compiler .*apt install build-essential"):
        install.require_compiler()
    (tmp_path / "cc").symlink_to(sys.executable)
    with pytest.raises(install.InstallError, match=r"no C\+\+ compiler .*looked for: c\+\+ g\+\+ clang\+\+"):
        install.require_compiler()
    monkeypatch.setenv("CXX", "cc -m64")
    install.require_compiler()


def test_pip_settings_that_put_packages_elsewhere_are_left_out(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PIP_TIMEOUT", "7")
    environment = install.pip_environment()
    assert "PIP_USER" not in environment
    assert "PIP_TARGET" not in environment
    assert environment["PIP_TIMEOUT"] == "7"


def test_a_change_of_a_lock_is_noticed_and_dev_serves_for_run(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install, "STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(install, "PYTHON", Path(sys.executable))
    wish = install.fingerprint(True)
    assert not install.satisfied(wish)
    install.STAMP.write_text(json.dumps(wish))
    assert install.satisfied(wish)
    assert install.satisfied(install.fingerprint(False))
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert not install.satisfied(install.fingerprint(False))


def test_a_gpu_build_stays_one_where_the_variable_is_unset(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(install, "PYTHON", Path(sys.executable))
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    made = install.fingerprint(False)
    install.STAMP.write_text(json.dumps(made))

    monkeypatch.delenv("CMAKE_ARGS")
    install.keep_cmake_args()
    (line,) = capsys.readouterr().out.splitlines()
    assert "keeping the build made with '-DGGML_CUDA=on'" in line
    assert os.environ["CMAKE_ARGS"] == "-DGGML_CUDA=on"
    assert install.satisfied(install.fingerprint(False))

    # An installation that was broken off remembers for which GPU it was, and is not whole.
    install.STAMP.write_text(json.dumps({"cmake_args": made["cmake_args"]}))
    monkeypatch.delenv("CMAKE_ARGS")
    install.keep_cmake_args()
    assert os.environ["CMAKE_ARGS"] == "-DGGML_CUDA=on"
    assert not install.satisfied(install.fingerprint(False))

    for other in ("", "-DGGML_VULKAN=on"):
        monkeypatch.setenv("CMAKE_ARGS", other)
        install.STAMP.write_text(json.dumps(made))
        install.keep_cmake_args()
        assert os.environ["CMAKE_ARGS"] == other
        assert not install.satisfied(install.fingerprint(False))


def test_an_environment_for_the_processor_needs_no_word(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "STAMP", tmp_path / "stamp.json")
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    for content in (None, "[]", "{", json.dumps(install.fingerprint(True))):
        if content is not None:
            install.STAMP.write_text(content)
        install.keep_cmake_args()
        assert "CMAKE_ARGS" not in os.environ
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(not shutil.which("make"), reason="no make on this machine")
def test_make_help_lists_the_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ})
    told = ("up", "test", "test-full", "bench", "soak", "lint", "format", "types", "lock", "images", "images-lock")
    for target in (*told, "clean", "help"):
        assert f"  make {target} " in done.stdout
