"""Dockerfiles as far as ours go: stages of instructions, without escapes other than a line's end.

`complaints` holds them to the rules that an image must keep; each is one line that names the file and what is wrong.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KNOWN = frozenset(
    (
        *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL"),
        *("RUN", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
    )
)
PINNED = re.compile(r"[a-z0-9./-]+:[A-Za-z0-9._-]*\d+\.\d+(\.\d+)?[A-Za-z0-9._-]*(@sha256:[0-9a-f]{64})?")
SECRET = re.compile(r"(?i)(password|passwd|secret|token|credential|api_?key|private_?key)")
PIP_INSTALL = re.compile(r"pip (?:install|wheel) ([^&|;]*)")


@dataclass(frozen=True, slots=True)
class Instruction:
    word: str
    rest: str


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def all(self, word: str) -> list[str]:
        return [one.rest for one in self.instructions if one.word == word]

    def last(self, word: str) -> str:
        return (self.all(word) or [""])[-1]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    path: Path
    stages: tuple[Stage, ...]

    def environment(self) -> dict[str, str]:
        """What the image's processes find set."""
        return dict(pair.split("=", 1) for rest in self.stages[-1].all("ENV") for pair in shlex.split(rest))


def read(path: Path) -> Dockerfile:
    """Raises ValueError for what is no Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    stages: list[tuple[str, str, list[Instruction]]] = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if not line.strip():
            continue
        word, _, rest = line.strip().partition(" ")
        if word not in KNOWN:
            raise ValueError(f"{path.name}: {word}: no such instruction")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append((name, base, []))
        elif not stages:
            raise ValueError(f"{path.name}: {word} before FROM")
        else:
            stages[-1][2].append(Instruction(word, rest.strip()))
    return Dockerfile(path, tuple(Stage(name, base, tuple(all_)) for name, base, all_ in stages))


def copied(rest: str) -> tuple[str, list[str]]:
    """COPY's stage (empty: the checkout) and the sources it names."""
    words = rest.split()
    flags = [word for word in words if word.startswith("--")]
    origin = next((flag.removeprefix("--from=") for flag in flags if flag.startswith("--from=")), "")
    return origin, [word for word in words if not word.startswith("--")][:-1]


def complaints(file: Dockerfile, tracked: frozenset[str]) -> Iterator[str]:
    """`tracked`: every path of the checkout that an image may hold."""
    for line in (*_of_stages(file), *_of_the_last(file.stages[-1]), *_of_copies(file, tracked)):
        yield f"{file.path.name}: {line}"


def _of_stages(file: Dockerfile) -> Iterator[str]:
    names = [stage.name for stage in file.stages]
    used = {stage.base for stage in file.stages} | {copied(rest)[0] for s in file.stages for rest in s.all("COPY")}
    for place, stage in enumerate(file.stages):
        if stage.base not in names[:place] and not PINNED.fullmatch(stage.base):
            yield f"the base {stage.base} has no exact tag"
        if not stage.name:
            yield "a stage has no name"
        elif stage.name not in used and place < len(names) - 1:
            yield f"nothing uses the stage {stage.name}"
        if stage.all("ADD"):
            yield "ADD; COPY what is in the checkout"
        for rest in (*stage.all("ARG"), *stage.all("ENV")):
            for name in re.findall(r"(?:^|\s)([A-Za-z_]\w*)(?==|$)", rest):
                if SECRET.search(name):
                    yield f"{name} would lie in the image for all to read"
        for rest in stage.all("RUN"):
            yield from _of_run(rest)


def _of_run(rest: str) -> Iterator[str]:
    if "apt-get install" in rest:
        if "--no-install-recommends" not in rest:
            yield "apt-get install without --no-install-recommends"
        if "apt-get update" not in rest or not re.search(r"rm -rf /var/lib/apt/lists/\*", rest):
            yield "apt-get install without apt-get update before and its lists removed after, in one RUN"
    if re.search(r"\b(curl|wget|git clone)\b", rest):
        yield "something is fetched that no lock names"
    for arguments in PIP_INSTALL.findall(rest):
        if "--no-deps" not in arguments or not ("--require-hashes" in arguments or "--no-index" in arguments):
            yield f"pip takes what no hash names: {arguments.strip()}"


def _of_the_last(stage: Stage) -> Iterator[str]:
    user = stage.last("USER").partition(":")[0]
    if not user.isdigit() or int(user) < 10_000:
        yield f"USER is {user or 'root'}; a number of 10000 or more is no user of the host's"
    for word in ("ENTRYPOINT", "CMD"):
        if not _is_exec(stage.last(word)):
            yield f"{word} is not in exec form: a shell would get the signals"
    health = stage.last("HEALTHCHECK")
    if not _is_exec(health.partition("CMD ")[2]):
        yield "HEALTHCHECK is missing or not in exec form"
    if stage.last("STOPSIGNAL") != "SIGTERM":
        yield "STOPSIGNAL is not SIGTERM"
    labels = stage.last("LABEL")
    for label in ("title", "description", "licenses", "version"):
        if f"org.opencontainers.image.{label}=" not in labels:
            yield f"no label org.opencontainers.image.{label}"


def _of_copies(file: Dockerfile, tracked: frozenset[str]) -> Iterator[str]:
    names = [stage.name for stage in file.stages]
    for stage in file.stages:
        for origin, sources in map(copied, stage.all("COPY")):
            if origin and origin not in names:
                yield f"COPY from {origin}: no such stage"
            for source in sources if not origin else ():
                if not any(path == source or path.startswith(f"{source}/") for path in tracked):
                    yield f"COPY {source}: not tracked, or kept out by .dockerignore"


def _is_exec(text: str) -> bool:
    try:
        words = json.loads(text)
    except ValueError:
        return False
    return isinstance(words, list) and all(isinstance(word, str) for word in words)
