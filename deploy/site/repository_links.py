"""Hooks of MkDocs: links that lead out of docs/, to files of the repository, lead to copies of them in the site.

So pages keep the links that work where they are read in the repository, and none of them leads nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
COPIES = "repository/"
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "helm/README.md")
"""Files outside of docs/ that the navigation names."""
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for path in _reached():
        files.append(File.generated(config, COPIES + path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links between files of the site, which lie elsewhere than in the repository."""
    uri = page.file.src_uri
    source = uri.removeprefix(COPIES) if uri.startswith(COPIES) else f"docs/{uri}"
    return LINK.sub(lambda found: f"]({relpath(_uri_of(_target(source, found[1])), dirname(uri) or '.')}", markdown)


def _target(source: str, link: str) -> str:
    """Return the path in the repository of what a file there links to."""
    return normpath(join(dirname(source), link))


def _uri_of(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else COPIES + path


def _reached() -> list[str]:
    """Return the files outside of docs/ to which links lead, from page to page."""
    found = dict.fromkeys(ALWAYS)
    waiting = [*ALWAYS, *(f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md")))]
    while waiting:
        for path in _links(waiting.pop()):
            if not path.startswith("docs/") and path not in found and (ROOT / path).is_file():
                found[path] = None
                waiting.append(path)
    return list(found)


def _links(path: str) -> Iterator[str]:
    if path.endswith(".md"):
        yield from (_target(path, link) for link in LINK.findall((ROOT / path).read_text()))
