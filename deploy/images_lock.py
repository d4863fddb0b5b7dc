"""Pins the images that deploy/docker, docker-compose.yml and the chart name to the digests that their tags have now.

    python3 deploy/images_lock.py [--check | --offline] [--registry HOST=URL ...]

Asks each image's registry for the digest of its tag (the OCI distribution API) and writes `name:tag@sha256:...` in
place; what is pinned is renewed. `--check` writes nothing and exits with 1 where a tag has moved. `--offline` asks
nobody and exits with 1 where an image is named without a digest, or with two. `--registry` names another address for a
registry, such as a mirror. Standard library only. Exit codes: 0 done, 1 a registry can't be
reached or a tag has moved, 2 an image has no such tag; then nothing is written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USUAL = "docker.io"
ADDRESSES = {USUAL: "https://registry-1.docker.io"}
TIMEOUT_S = 20.0
MOST_BYTES = 8 << 20
ACCEPTED = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
REFERENCE = re.compile(
    r"^(?P<before>FROM |\s+image: )(?P<name>[a-z0-9][a-z0-9./-]*):(?P<tag>[\w.-]+)"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?(?=\s|$)",
    re.MULTILINE,
)
"""Ours carry their version by a variable, and are no match."""


class LockError(Exception):
    """A registry does not tell; the message names the image and the remedy."""

    code = 1


class Unknown(LockError):
    code = 2


@dataclass(frozen=True, slots=True)
class Image:
    name: str
    tag: str

    @property
    def registry(self) -> str:
        first, slash, _ = self.name.partition("/")
        return first if slash and re.search(r"[.:]|^localhost$", first) else USUAL

    @property
    def repository(self) -> str:
        path = self.name.removeprefix(f"{self.registry}/")
        return path if "/" in path or self.registry != USUAL else f"library/{path}"


def files(root: Path) -> list[Path]:
    named = (root / "docker-compose.yml", root / "helm" / "values.yaml")
    return [*sorted((root / "deploy" / "docker").glob("*.Dockerfile")), *named]


def images(texts: Sequence[str]) -> list[Image]:
    found = {Image(match["name"], match["tag"]) for text in texts for match in REFERENCE.finditer(text)}
    return sorted(found, key=lambda image: (image.name, image.tag))


def pinned(text: str, digests: Mapping[Image, str]) -> str:
    def with_digest(match: re.Match[str]) -> str:
        name, tag = match["name"], match["tag"]
        return f"{match['before']}{name}:{tag}@{digests[Image(name, tag)]}"

    return REFERENCE.sub(with_digest, text)


def told(texts: Sequence[str]) -> dict[Image, set[str]]:
    """Return the digests that the files give each image; an empty one where it stands without."""
    found: dict[Image, set[str]] = {}
    for match in (match for text in texts for match in REFERENCE.finditer(text)):
        found.setdefault(Image(match["name"], match["tag"]), set()).add(match["digest"] or "")
    return found


def complaints(texts: Sequence[str]) -> list[str]:
    """Return a line for each image that is not one image for ever: a tag alone may point at another tomorrow."""
    lines = []
    for image, digests in sorted(told(texts).items(), key=lambda pair: (pair[0].name, pair[0].tag)):
        name = f"{image.name}:{image.tag}"
        if digests == {""}:
            lines.append(f"{name} is named by its tag only; `make images-lock` pins it where its registry is reachable")
        elif len(digests) > 1:
            lines.append(f"{name} has a digest here and none, or another, there; `make images-lock` writes one in all")
    return lines


def digest(image: Image, addresses: Mapping[str, str]) -> str:
    """What the image's tag points at now. Raises LockError."""
    base = addresses.get(image.registry) or f"https://{image.registry}"
    url = f"{base}/v2/{image.repository}/manifests/{image.tag}"
    try:
        return _ask(url, {"Accept": ACCEPTED})
    except urllib.error.HTTPError as error:
        if error.code == 401:
            return _ask_with_token(image, url, error.headers.get("WWW-Authenticate", ""))
        raise _refused(image, error) from None
    except OSError as error:
        raise LockError(
            f"{image.name}:{image.tag}: no answer from {base} ({error}); run this where the registry is reachable, "
            f"or name a mirror with --registry {image.registry}=URL"
        ) from None


def _ask_with_token(image: Image, url: str, challenge: str) -> str:
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = fields.pop("realm", "")
    if not challenge.lower().startswith("bearer ") or not realm.startswith(("https://", "http://127.0.0.1:")):
        raise LockError(f"{image.name}:{image.tag}: the registry asks for a login; use one that gives to anybody")
    try:
        with urllib.request.urlopen(f"{realm}?{urllib.parse.urlencode(fields)}", timeout=TIMEOUT_S) as answer:
            told = json.loads(answer.read(MOST_BYTES))
        token = told.get("token") or told.get("access_token") or ""
        return _ask(url, {"Accept": ACCEPTED, "Authorization": f"Bearer {token}"})
    except urllib.error.HTTPError as error:
        raise _refused(image, error) from None
    except (OSError, ValueError) as error:
        raise LockError(f"{image.name}:{image.tag}: no permission from {realm} ({error}); try again later") from None


def _ask(url: str, headers: Mapping[str, str]) -> str:
    """The digest of what lies there, computed: it must be what the registry says it is."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=TIMEOUT_S) as answer:
        content = answer.read(MOST_BYTES)
        told = answer.headers.get("Docker-Content-Digest", "")
    found = f"sha256:{hashlib.sha256(content).hexdigest()}"
    if told and (not DIGEST.fullmatch(told) or told != found):
        raise LockError(f"{url}: the registry says {told}, but what it sent is {found}; do not trust it")
    return found


def _refused(image: Image, error: urllib.error.HTTPError) -> LockError:
    if error.code == 404:
        return Unknown(f"{image.name}:{image.tag}: its registry has no such image or tag; choose one that exists")
    return LockError(f"{image.name}:{image.tag}: the registry answered {error.code} {error.reason}; try again later")


def main(args: Sequence[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="images_lock.py")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--check", action="store_true")
    ways.add_argument("--offline", action="store_true")
    parser.add_argument("--registry", action="append", default=[], metavar="HOST=URL")
    flags = parser.parse_args(args)
    addresses = ADDRESSES | dict(pair.partition("=")[::2] for pair in flags.registry)
    texts = {path: path.read_text() for path in files(root)}
    if flags.offline:
        lines = complaints(list(texts.values()))
        for line in lines:
            print(f"images-lock: {line}", file=sys.stderr)
        return int(bool(lines))
    try:
        digests = {image: digest(image, addresses) for image in images(list(texts.values()))}
    except LockError as error:
        print(f"images-lock: {error}. Nothing was written.", file=sys.stderr)
        return error.code
    moved = 0
    for path, text in texts.items():
        fresh = pinned(text, digests)
        moved += fresh != text
        if fresh != text and not flags.check:
            path.write_text(fresh)
    for image, found in digests.items():
        print(f"images-lock: {image.name}:{image.tag} {found}")
    if flags.check and moved:
        print("images-lock: these are not what the files say; `make images-lock` writes them", file=sys.stderr)
    return int(bool(flags.check and moved))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
