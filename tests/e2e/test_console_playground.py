"""The playground in a true browser: attached files, thoughts, and two models that take different things."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import FilePayload, Page, expect

from tests.support.console import NEEDS_CHROMIUM, signed_in
from tests.support.media_files import picture_file, sound_file
from tests.support.projectors import SAMPLE_RATE, picture, sound, write_pair
from tests.support.stack import DEMO_MODEL, Stack

SEER, READER, NOTER, HEARER, THINKER = "seer", "reader", "noter", "hearer", "thinker"
THOUGHT, ANSWER = "A fox is red, so I say red.", "It is red."
PNG: FilePayload = {
    "name": "fox.png",
    "mimeType": "image/png",
    "buffer": picture_file(Image.fromarray(picture(1)), "PNG"),
}
WAV: FilePayload = {"name": "fox.wav", "mimeType": "audio/wav", "buffer": sound_file(sound(1), SAMPLE_RATE)}
LEFT_OUT = "1 attached file not sent: this model does not take such files"

pytestmark = [NEEDS_CHROMIUM, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A true model with a projector and one without; models that note what they were given, and one that thinks."""
    with Stack() as running:
        pair = write_pair(running.folder, "phi4")
        template = DEMO_MODEL.with_name("chat_template.jinja").read_text()
        running.worker(pair.model, SEER, projector=pair.projector, chat_template=template, slots=2, ctx=2048)
        running.worker(DEMO_MODEL, READER, slots=2)
        for name, inputs in ((NOTER, "text,image"), (HEARER, "text,audio")):
            file = str(noted_by(running, name))
            running.fake_worker(name, "--inputs", inputs, "--submits", file, "--step-ms", "1")
        running.fake_worker(THINKER, "--thinks", "--answer", f"<think>{THOUGHT}</think>{ANSWER}", "--step-ms", "1")
        gateway = running.gateway()
        running.wait_until_listed(gateway, SEER, READER, NOTER, HEARER, THINKER)
        yield running


def noted_by(stack: Stack, name: str) -> Path:
    return stack.folder / f"{name}.jsonl"


def media_given(stack: Stack, name: str) -> list[list[str]]:
    """Return the kinds of media of each call that a model got."""
    lines = noted_by(stack, name).read_text().splitlines()
    return [[one[0] for one in json.loads(line)["media"]] for line in lines]


def choose(page: Page, model: str, other: str = "") -> None:
    page.locator("aside select").first.select_option(model)
    if other:
        page.get_by_label("Compare with").select_option(other)


def say(page: Page, text: str, *files: FilePayload) -> None:
    if files:
        page.get_by_label("Attach a file").set_input_files(list(files))
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def test_a_picture_is_attached_to_a_model_that_sees(page: Page, stack: Stack) -> None:
    signed_in(page, stack, view="playground")
    choose(page, READER)
    expect(page.get_by_label("Attach a file")).to_have_count(0)
    choose(page, SEER)
    page.get_by_text("Parameters", exact=True).click()
    page.get_by_label("max_tokens").fill("12")
    page.get_by_label("Attach a file").set_input_files([PNG])
    waiting = page.locator("form.say img")
    expect(waiting).to_be_visible()
    assert waiting.evaluate("(image) => image.naturalWidth") == 64
    page.get_by_label("Message").fill("What is it?")
    page.get_by_role("button", name="Show the code").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("data:image/png;base64,")
    dialog.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Send").click()
    expect(page.locator("article.user img")).to_be_visible()
    expect(waiting).to_have_count(0)
    answer = page.locator("article.assistant").last
    expect(answer).to_contain_text("tokens/s")
    read = (answer.locator("small").text_content() or "").split(" tokens read")[0]
    say(page, "And again?")  # the picture stays a part of the conversation
    expect(page.locator("article.assistant")).to_have_count(2)
    expect(page.locator("article.assistant").last).to_contain_text("tokens/s")
    expect(page.get_by_role("alert")).to_have_count(0)
    page.get_by_role("button", name="New conversation").click()
    say(page, "What is it?")
    expect(answer).to_contain_text("tokens/s")
    without = (answer.locator("small").text_content() or "").split(" tokens read")[0]
    assert int(read) > int(without) + 10, "the picture has cells of its own"


def test_thoughts_are_folded(page: Page, stack: Stack) -> None:
    signed_in(page, stack, view="playground")
    choose(page, THINKER)
    say(page, "What colour?")
    answer = page.locator("article.assistant").last
    expect(answer.locator(".said").last).to_have_text(ANSWER)
    folded = answer.locator("details")
    expect(folded.get_by_text(THOUGHT)).to_be_hidden()
    folded.get_by_text("Thoughts").click()
    expect(folded.get_by_text(THOUGHT)).to_be_visible()


def test_side_by_side_each_model_gets_what_it_takes(page: Page, stack: Stack) -> None:
    signed_in(page, stack, view="playground")
    choose(page, NOTER, HEARER)
    say(page, "What is it?", PNG, WAV)
    for name, kind in ((NOTER, "picture"), (HEARER, "sound")):
        talk = page.get_by_role("region", name=name, exact=True)
        expect(talk.locator("article.assistant")).to_contain_text("tokens/s")
        expect(talk.locator("article.user")).to_contain_text(LEFT_OUT)
        assert media_given(stack, name)[-1] == [kind]
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_model_that_only_reads_answers_beside_one_that_sees(page: Page, stack: Stack) -> None:
    """Whichever of the two is chosen first."""
    signed_in(page, stack, view="playground")
    for first, second in ((READER, NOTER), (NOTER, READER)):
        choose(page, first, second)
        page.get_by_role("button", name="New conversation").click()
        say(page, "What is it?", PNG)
        for name, is_told in ((READER, True), (NOTER, False)):
            talk = page.get_by_role("region", name=name, exact=True)
            expect(talk.locator("article.assistant")).to_contain_text("tokens/s")
            expect(talk.get_by_text(LEFT_OUT)).to_have_count(int(is_told))
            expect(talk.locator("article.user img")).to_have_count(int(not is_told))
        assert media_given(stack, NOTER)[-1] == ["picture"]
    expect(page.get_by_role("alert")).to_have_count(0)
