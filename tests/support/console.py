"""The console in a true browser: fixtures for its pages, and how people sign in and go from view to view."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.support.stack import Stack

expect.set_options(timeout=15_000)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
TAKES_PICTURES = os.environ.get("TAKE_PICTURES") == "1"
"""Whether the views' screenshots are written into the docs."""
TOLD_MS = 15_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(TOLD_MS)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A page that raises no error and breaks no rule of its content security policy."""
    page, faults = context.new_page(), list[str]()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console",
        lambda message: (
            faults.append(message.text) if message.type == "error" and "Content Security" in message.text else None
        ),
    )
    yield page
    assert not faults


def signed_in(page: Page, stack: Stack, key: str = "", view: str = "fleet") -> Page:
    page.goto(f"{stack.gateways[0].url}/#/{view}" if view == "fleet" else f"{stack.gateways[0].url}/ui#/{view}")
    page.fill("input[name=key]", key or stack.key)
    page.click("button[type=submit]")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible(timeout=TOLD_MS)
    return page


def open_view(page: Page, view: str) -> None:
    page.click(f'nav a[href="#/{view}"]')
    expect(page.locator(f'nav a[href="#/{view}"]')).to_have_attribute("aria-current", "page")


def take(page: Page, view: str, after_s: float = 0.5) -> None:
    """Keep a picture of a view for the docs, if pictures are taken."""
    if TAKES_PICTURES:
        page.wait_for_timeout(1000 * after_s)
        page.screenshot(path=PICTURES / f"console-{view}.png", full_page=view == "fleet")
