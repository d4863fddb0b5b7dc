"""The programs whose requests are recorded: where they install from, and how each is run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reference import sdist_source
from tests.clients.recorder import Recorder
from tests.clients.recording import Recording

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Program:
    """One program, and its script of `tests/clients/scripts`, which does what its users do."""

    title: str
    packages: tuple[str, ...]
    """Of PyPI where the script is Python's, else of npm; the first one's version is the program's."""
    script: str
    sources: str = ""
    """Folder of llama.cpp's sources in llama-cpp-python's sdist that it is built from, in place of packages."""

    @property
    def is_python(self) -> bool:
        return self.script.endswith(".py")


PROGRAMS = {
    "openai-python": Program("openai (Python)", ("openai",), "openai_python.py"),
    "openai-js": Program("openai (JavaScript)", ("openai", "zod"), "openai_js.mjs"),
    "anthropic-python": Program("anthropic (Python)", ("anthropic",), "anthropic_python.py"),
    "anthropic-js": Program("anthropic (JavaScript)", ("@anthropic-ai/sdk", "zod"), "anthropic_js.mjs"),
    "vercel-ai": Program(
        "Vercel AI SDK", ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic"), "vercel_ai.mjs"
    ),
    "langchain-python": Program(
        "LangChain (Python)", ("langchain-openai", "langchain-anthropic", "langchain"), "langchain_python.py"
    ),
    "langchain-js": Program("LangChain (JavaScript)", ("@langchain/openai", "@langchain/core"), "langchain_js.mjs"),
    "llamaindex": Program(
        "LlamaIndex", ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like"), "llamaindex_python.py"
    ),
    "litellm": Program("litellm", ("litellm", "mcp"), "litellm_python.py"),
    "instructor": Program("instructor", ("instructor",), "instructor_python.py"),
    "openai-agents": Program("openai-agents", ("openai-agents",), "openai_agents_python.py"),
    "pydantic-ai": Program("Pydantic AI", ("pydantic-ai-slim[openai,anthropic]",), "pydantic_ai_python.py"),
    "llm": Program("llm", ("llm",), "llm_python.py"),
    "aider": Program("Aider", ("aider-chat",), "aider_python.py"),
    "continue": Program("Continue", ("@continuedev/cli", "@continuedev/openai-adapters"), "continue_js.mjs"),
    "cline": Program("Cline", ("cline",), "cline_js.mjs"),
    "librechat": Program("LibreChat (its agents)", ("@librechat/agents", "@langchain/core"), "librechat_js.mjs"),
    "open-webui": Program("Open WebUI", ("open-webui",), "openwebui_python.py"),
    "sillytavern": Program("SillyTavern", ("sillytavern",), "sillytavern_js.mjs"),
    "llama-ui": Program("llama.cpp's web UI", (), "llama_ui.mjs", sources="tools/ui"),
}
"""Name of the recording -> the program."""
HELPING = ("zod", "@langchain/core", "mcp")
"""Packages that send nothing."""


def install(name: str, folder: Path) -> None:
    """Install the program into a folder of its own, unless it is there."""
    program, place = PROGRAMS[name], folder / name
    if place.exists():
        return
    place.mkdir(parents=True)
    if program.is_python:
        _must([sys.executable, "-m", "venv", "."], place)
        _must(["bin/pip", "install", "--quiet", *program.packages], place)
    elif program.sources:
        shutil.copytree(sdist_source() / "vendor" / "llama.cpp" / program.sources, place, dirs_exist_ok=True)
        _must(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], place)
        _must(["npx", "vite", "build"], place)
    else:
        (place / "package.json").write_text(json.dumps({"private": True, "type": "module"}))
        _must(["npm", "install", "--no-audit", "--no-fund", *program.packages], place)


def record(name: str, folder: Path, recorder: Recorder) -> Recording:
    """Return what the program sends; prints what it says of requests that failed."""
    program, place = PROGRAMS[name], folder / name
    with tempfile.TemporaryDirectory() as home:
        command = [str(place / "bin" / "python"), str(SCRIPTS / program.script)]
        if not program.is_python:
            # A package is looked for beside the file that imports it.
            for file in SCRIPTS.glob("*.mjs"):
                (place / file.name).write_text(file.read_text())
            command = ["node", str(place / program.script)]
        done = subprocess.run(command, cwd=home, env=_environment(recorder, place, home), timeout=TIMEOUT_S)
    if done.returncode:
        print(f"{name}: some steps failed", file=sys.stderr)
    for refusal in recorder.refusals:
        print(f"{name}: {refusal}", file=sys.stderr)
    # A page asks the same each time that it is opened.
    calls = list({repr(call): call for call in recorder.calls}.values()) if program.sources else recorder.calls
    return Recording(program.title, version(name, folder), "recorded", calls=calls)


def version(name: str, folder: Path) -> str:
    """Return the versions that are installed there, the program's first."""
    program, place = PROGRAMS[name], folder / name
    packages = program.packages
    if program.sources:
        return f"of llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"
    if not program.is_python:
        files = [place / "node_modules" / package / "package.json" for package in packages]
        return _told(packages, [json.loads(file.read_text())["version"] for file in files])
    names = ", ".join(repr(package.partition("[")[0]) for package in packages)
    ask = f"from importlib.metadata import version\nfor name in ({names},): print(version(name))"
    told = subprocess.run([place / "bin" / "python", "-c", ask], capture_output=True, text=True, check=True)
    return _told(packages, told.stdout.split())


def _told(packages: Sequence[str], versions: Sequence[str]) -> str:
    """Return the program's version, and those of what it asks with; what only our script needs is not told."""
    if len([package for package in packages if package not in HELPING]) == 1:
        return versions[0]
    return ", ".join(f"{package.partition('[')[0]} {told}" for package, told in zip(packages, versions, strict=True))


def _environment(recorder: Recorder, place: Path, home: str) -> dict[str, str]:
    """Return the variables that each program reads the address and its key from, and a home without settings."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return kept | {
        "HOME": home,
        "PLACE": str(place),
        "PADDOCK_URL": recorder.url,
        "PADDOCK_KEY": recorder.key,
        "OPENAI_BASE_URL": f"{recorder.url}/v1",
        "OPENAI_API_BASE": f"{recorder.url}/v1",
        "OPENAI_API_KEY": recorder.key,
        "ANTHROPIC_BASE_URL": recorder.url,
        "ANTHROPIC_API_KEY": recorder.key,
        "DO_NOT_TRACK": "1",
        # litellm, and what asks through it, would look for newer prices, and wait for them.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _must(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True)
