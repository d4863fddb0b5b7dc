"""Hooks of MkDocs: pages are written in GitHub's Markdown, and Python-Markdown reads some of it otherwise.

What belongs to an item of a list is indented to the item's text there, by two characters or three, and by four here;
and Markdown within HTML is read only where the element says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

FENCE = re.compile(r"^(?:```|~~~)")
ITEM = re.compile(r"^(?:[-*+]|\d+\.) +")
INDENT = 4


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    return "\n".join(_lines(markdown.replace("<details>", "<details markdown>").splitlines()))


def _lines(lines: list[str]) -> Iterator[str]:
    """Yield the lines, those that belong to an item of a list indented by four characters, and a gap after an item of
    several paragraphs."""
    offset, is_fenced, before = 0, False, ""
    has_gap = False
    for line in lines:
        if offset and line.startswith(" " * offset):
            has_gap |= not before.strip()
            yield " " * max(0, INDENT - offset) + line
        else:
            if not is_fenced and (item := ITEM.match(line)):
                if has_gap and before.strip():
                    yield ""
                offset, has_gap = len(item[0]), False
            elif line.strip() and not before.strip():  # else it goes on with the item's paragraph
                offset = 0
            is_fenced ^= bool(FENCE.match(line))
            yield line
        before = line
