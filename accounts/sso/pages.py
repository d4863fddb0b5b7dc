"""The pages that a browser sees while its user signs in: plain HTML that loads nothing and runs no script."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import HTMLResponse

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 34rem; margin: 15vh auto; padding: 0 1.5rem; color: #222;
       background: #fff; }
h1 { font-size: 1.4rem; } a { color: #0645ad; } ul { padding: 0; list-style: none; }
li a { display: block; margin: .5rem 0; padding: .6rem 1rem; border: 1px solid #bbb; border-radius: .4rem; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818; } a { color: #8ab4f8; } }
"""
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Link:
    """A link on a page."""

    text: str
    address: str


def page(title: str, told: str, links: Sequence[Link] = (), status: int = 200) -> HTMLResponse:
    """Return a page. Whatever is given is text, and is escaped."""
    listed = "".join(f'<li><a href="{html.escape(link.address)}">{html.escape(link.text)}</a></li>' for link in links)
    body = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><h1>{html.escape(title)}</h1><p>{html.escape(told)}</p>{f'<ul>{listed}</ul>' if links else ''}"
        "</body></html>"
    )
    return HTMLResponse(body, status, HEADERS)
