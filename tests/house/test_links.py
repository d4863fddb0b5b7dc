"""Every page that another page points at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.md"), *(ROOT / "helm").glob("*.md")]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    linked = {page.parent / link for link in re.findall(r"\]\((?!https?://)([^)#]+)", text)}
    named = {ROOT / name for name in re.findall(r"(?<![\w/])(docs/[\w.-]+\.(?:md|json))", text)}
    assert [str(path) for path in sorted(linked | named) if not path.exists()] == []


def test_the_readme_links() -> None:
    assert len(re.findall(r"\]\(docs/", (ROOT / "README.md").read_text())) >= 8
