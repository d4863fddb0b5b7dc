"""Downloads in the console's page of models, in a true browser: how far they are, and why they fail."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from gateway.client import Client, NotFound, NotSupported
from tests.support.console import NEEDS_CHROMIUM, open_view, signed_in
from tests.support.hub_server import Hub
from tests.support.stack import DEMO_MODEL, Stack
from tests.support.waiting import wait_until

GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
LARGE = GGUF + bytes((25 << 20) - len(GGUF))
HALF = 15 << 20
MODEL = "owner/model-GGUF:Q4_K_M"

pytestmark = [NEEDS_CHROMIUM, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub({"owner/model-GGUF": {"m-Q4_K_M.gguf": LARGE}}) as served:
        yield served


@pytest.fixture(scope="module")
def stack(hub: Hub) -> Iterator[Stack]:
    with Stack() as running:
        catalog = running.folder / "machine.json"
        lazy = {"name": "cold", "path": str(DEMO_MODEL), "slots": 1, "ctx": 128, "residency": {"min_resident_s": 0}}
        catalog.write_text(json.dumps({"models": [lazy]}))
        command = [sys.executable, "-m", "gateway.cli", "supervisor", "--catalog", str(catalog)]
        running.spawn("supervisor", command, hub.environment, role="supervisor")
        running.gateway(catalog=catalog)
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.gateways[0].url, stack.key) as opened:
        yield opened


def test_how_far_a_download_is_and_that_it_ends(page: Page, stack: Stack, hub: Hub, client: Client) -> None:
    signed_in(page, stack, view="models")
    expect(page.get_by_role("region", name="Models", exact=True)).to_contain_text("cold")
    listed = page.get_by_role("region", name="Downloads")
    expect(listed).to_have_count(0)
    hub.pause_after = HALF
    wait_until(lambda: takes_orders(client), 30)
    client.models.download(MODEL)
    row = listed.get_by_role("row").filter(has_text="owner/model")
    expect(row).to_contain_text("downloading")
    expect(row).to_contain_text(re.compile(r"1[0-5](\.\d+)? MiB of 25 MiB, [4-6]\d %"))
    bar = row.get_by_role("progressbar")
    assert 40 <= int(bar.get_attribute("aria-valuenow") or 0) <= 60

    # Whoever comes later sees the same.
    open_view(page, "fleet")
    open_view(page, "models")
    expect(row).to_contain_text("of 25 MiB")
    client.models.remove(MODEL)
    expect(listed).to_have_count(0)
    hub.pause_after = 0
    client.models.download(MODEL)
    expect(row).to_contain_text("finished")
    expect(row).to_contain_text("25 MiB of 25 MiB, 100 %")


def test_why_a_download_failed(page: Page, stack: Stack, client: Client) -> None:
    signed_in(page, stack, view="models")
    expect(page.get_by_role("region", name="Models", exact=True)).to_contain_text("cold")
    wait_until(lambda: takes_orders(client), 30)
    client.models.download("owner/nothing")
    row = page.get_by_role("region", name="Downloads").get_by_role("row").filter(has_text="owner/nothing")
    expect(row).to_contain_text("failed")
    expect(row).to_contain_text("no such model on the hub")


def test_a_models_state_is_live(page: Page, stack: Stack, client: Client) -> None:
    signed_in(page, stack, view="models")
    row = page.get_by_role("region", name="Models", exact=True).get_by_role("row", name=re.compile("^cold"))
    expect(row).to_contain_text("unloaded")
    client.chat.completions.create([{"role": "user", "content": "hi"}], model="cold", max_tokens=1)
    expect(row.get_by_text("loaded", exact=True)).to_be_visible()


def takes_orders(client: Client) -> bool:
    """Return whether the supervisor has told that it takes orders."""
    try:
        client.models.remove("owner/none")
    except NotSupported:
        return False
    except NotFound:
        return True
    raise AssertionError("there is no such model")
