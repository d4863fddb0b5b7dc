"""People sign in to the console by their organisation, in a true browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.support.sign_on_front import EVE, SignOnFront, sign_on_front

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TOLD_MS = 15_000

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def front() -> Iterator[SignOnFront]:
    with sign_on_front() as running:
        yield running


def test_a_person_signs_in_by_the_organisation_and_out_again(front: SignOnFront) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context()
        context.set_default_timeout(TOLD_MS)
        page = context.new_page()
        page.goto(front.url)
        page.get_by_role("link", name="Sign in with your organisation").click()
        expect(page.get_by_text("ann@example.com (user)")).to_be_visible(timeout=TOLD_MS)
        assert page.url.startswith(f"{front.url}/ui")
        assert page.locator("nav a").all_text_contents() == ["Playground", "Access", "Models"]
        [cookie] = [one for one in context.cookies() if one["name"] == "paddock"]
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")  # it is set on the way back
        page.get_by_label("Message").fill("hi")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("article.assistant").last).to_contain_text("tokens/s")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("link", name="Sign in with your organisation")).to_be_visible()
        assert not [one for one in context.cookies() if one["name"] == "paddock"]
        front.until(cookie["value"], 401)  # whoever has kept it can't use it
        browser.close()


def test_who_may_not_is_told_why(front: SignOnFront) -> None:
    front.provider.person = dict(EVE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(front.url)
        page.get_by_role("link", name="Sign in with your organisation").click()
        expect(page.locator("body")).to_contain_text("eve@example.com", timeout=TOLD_MS)
        page.goto(front.url)
        expect(page.locator("input[name=key]")).to_be_visible(timeout=TOLD_MS)
        browser.close()
