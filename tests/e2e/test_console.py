"""The console in a true browser, in front of true workers: what people see and do."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from gateway.client import AnswerError, AuthenticationFailed, Client
from tests.support.console import NEEDS_CHROMIUM, TAKES_PICTURES, open_view, signed_in, take
from tests.support.stack import DEMO_MODEL, Stack

PROBE = "<img src=x onerror=window.struck=1>"
MOST_MS = 50
"""A longer task is one that a person notices (W3C Long Tasks)."""
ANEW_S = 30.0
"""Within it a worker that was drained serves again."""
VIEWS = ("fleet", "queue", "playground", "access", "models", "health")

pytestmark = [
    NEEDS_CHROMIUM,
    pytest.mark.timeout(240),
    pytest.mark.serial,  # a person looks at one page: beside other tests it is slower than anybody would see it
]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        catalog = running.folder / "catalog.yaml"
        catalog.write_text(
            "models:\n  - {name: demo, path: demo.gguf}\n  - {name: cold, path: cold.gguf, residency: {}}\n"
            "aliases: {gpt-4: demo}\n"
        )
        running.worker(DEMO_MODEL, "demo", worker_id="demo-0", slots=4)
        of_machine = running.folder / "machine.json"
        cold = {"name": "cold", "path": str(DEMO_MODEL), "slots": 2, "ctx": 512, "residency": {"min_resident_s": 0}}
        of_machine.write_text(json.dumps({"models": [cold]}))
        command = [sys.executable, "-m", "gateway.cli", "supervisor", "--catalog", str(of_machine)]
        running.spawn("supervisor", command, role="supervisor")
        running.gateway(accounts_url=running.accounts().url, catalog=catalog)
        yield running


@contextmanager
def calls(stack: Stack) -> Iterator[None]:
    """Somebody calls the model again and again while the block lasts."""
    over = threading.Event()

    def call() -> None:
        with Client(stack.gateways[0].url, stack.key) as client:
            while not over.is_set():
                client.chat.completions.create(
                    [{"role": "user", "content": "Once"}], model="demo", max_tokens=400, ignore_eos=True
                )

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_the_key_is_kept_in_a_cookie_that_no_script_reads(page: Page, context: BrowserContext, stack: Stack) -> None:
    page.goto(stack.gateways[0].url)
    assert page.url.endswith("/ui")
    page.fill("input[name=key]", "pk-wrong")
    page.click("button[type=submit]")
    expect(page.get_by_role("alert")).to_contain_text("not known")
    signed_in(page, stack)
    [cookie] = context.cookies()
    assert (cookie["value"], cookie["httpOnly"], cookie["sameSite"]) == (stack.key, True, "Strict")
    stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert stack.key not in stored
    page.reload()  # the session outlives the page
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("input[name=key]")).to_be_visible()
    assert context.cookies() == []


def test_the_fleet_is_live(page: Page, stack: Stack) -> None:
    signed_in(page, stack)
    models = page.get_by_role("region", name="Models")
    expect(models).to_contain_text("gpt-4")
    expect(models.get_by_role("row", name=re.compile("^cold"))).to_contain_text("on demand")
    with ExitStack() as callers:
        for _ in range(3 if TAKES_PICTURES else 1):
            callers.enter_context(calls(stack))
        page.get_by_role("button", name="demo-0", exact=True).click()
        slots = page.get_by_role("region", name="Slots: demo-0")
        expect(slots).to_contain_text("req-")
        expect(slots).to_contain_text("default")
        take(page, "fleet", after_s=40)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("status").first).to_have_text("Paused")
    page.get_by_role("button", name="Go on").click()
    expect(page.get_by_role("status").first).to_have_text("Live")


def test_a_load_says_first_what_it_would_do(page: Page, stack: Stack) -> None:
    signed_in(page, stack)
    machines = page.get_by_role("region", name="Machines")
    expect(machines).to_contain_text("main memory")
    expect(machines).to_contain_text("No worker here.")
    models = page.get_by_role("region", name="Models")
    models.get_by_role("button", name="Load cold").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(re.compile(r"main memory: .* are free"))
    expect(dialog).to_contain_text(re.compile(r"Start cold on .* an admin loads cold"))
    take(page, "load")
    dialog.get_by_role("button", name="Load", exact=True).click()
    expect(dialog).to_have_count(0)
    expect(machines).to_contain_text(re.compile("cold: .* GiB"))
    row = models.get_by_role("row", name=re.compile("^cold"))
    expect(row).to_contain_text("loaded")
    open_view(page, "models")
    expect(page.get_by_role("region", name="Memory")).to_contain_text("cold")
    open_view(page, "fleet")
    models.get_by_role("button", name="Unload cold").click()
    expect(dialog).to_contain_text("cold has 0 running calls")
    expect(dialog).to_contain_text(re.compile("Stop cold|cold .*leaves|unloaded"))
    dialog.get_by_role("button", name="Unload", exact=True).click()
    expect(row).to_contain_text("on demand")
    expect(machines).to_contain_text("No worker here.")


def test_an_admin_drains_a_worker(page: Page, stack: Stack) -> None:
    with Client(stack.gateways[0].url, stack.key) as client:
        client.chat.completions.create([{"role": "user", "content": "Once"}], model="cold", max_tokens=4)
    signed_in(page, stack)
    workers = page.get_by_role("region", name="Workers")
    row = workers.get_by_role("row").filter(has_text="cold")
    expect(row).to_contain_text("serving")
    [(name, before)] = workers_of(page, stack, "cold").items()
    row.get_by_role("button", name=f"Drain {name}").click()
    dialog = page.get_by_role("dialog", name=f"Drain {name}")
    expect(dialog).to_contain_text(f"{name} has no calls, and ends at once.")
    expect(dialog).to_contain_text(
        "No other worker of cold takes calls: new ones wait until this one has started anew."
    )
    expect(dialog).to_contain_text("Then its supervisor starts it again")
    dialog.get_by_role("button", name="Drain", exact=True).click()
    expect(dialog).to_have_count(0)
    until = time.monotonic() + ANEW_S
    while not any(now["started_at"] > before["started_at"] for now in workers_of(page, stack, "cold").values()):
        assert time.monotonic() < until
        time.sleep(0.1)
    expect(row).to_contain_text("serving")
    expect(row.get_by_role("button", name=f"Drain {name}")).to_be_enabled()
    # Of a worker that nobody keeps it says that it would stay away; nothing is done before it is confirmed.
    workers.get_by_role("button", name="Drain demo-0").click()
    dialog = page.get_by_role("dialog", name="Drain demo-0")
    expect(dialog).to_contain_text("No supervisor keeps it: it is back only if something else starts it again")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    assert not workers_of(page, stack, "demo")["demo-0"]["is_draining"]
    headers = {"authorization": f"Bearer {stack.key}"}
    assert page.request.post(f"{stack.gateways[0].url}/models/unload", headers=headers, data={"model": "cold"}).ok


def workers_of(page: Page, stack: Stack, model: str) -> dict[str, dict[str, Any]]:
    answer = page.request.get(
        f"{stack.gateways[0].url}/admin/fleet", headers={"authorization": f"Bearer {stack.key}"}
    ).json()
    return {name: row for name, row in answer["workers"].items() if row["model"] == model}


def test_a_catalog_is_checked_before_it_is_used(page: Page, stack: Stack) -> None:
    file = stack.folder / "catalog.yaml"
    before = file.read_text()
    signed_in(page, stack, view="models")
    page.get_by_role("button", name="Edit").click()
    area = page.get_by_label("Contents of the file")
    expect(area).to_have_value(before)
    area.fill(before.replace("residency", "residenz") + f"# {PROBE}\nalias: 1\n")
    page.get_by_role("button", name="Check").click()
    section = page.get_by_role("region", name="Catalog")
    expect(section).to_contain_text("did you mean `residency`?")
    expect(section.get_by_role("listitem")).to_have_count(2)
    expect(page.get_by_role("button", name="Write and use")).to_be_disabled()
    section.get_by_role("button", name="Line 3:").click()
    chosen = page.evaluate(
        "(({value, selectionStart: a, selectionEnd: b}) => value.slice(a, b))(document.activeElement)"
    )
    assert chosen == "  - {name: cold, path: cold.gguf, residenz: {}}"
    area.fill(before.replace("{gpt-4: demo}", "{gpt-4: demo, gpt-5: demo}") + f"# {PROBE}\n")
    page.get_by_role("button", name="Check").click()
    expect(section).to_contain_text("aliases added: gpt-5")
    page.get_by_role("button", name="Write and use").click()
    expect(section).to_contain_text("This gateway uses it")
    expect(page.get_by_role("region", name="Models", exact=True)).to_contain_text("gpt-5")
    assert "gpt-5" in file.read_text()
    assert page.evaluate("window.struck") is None
    file.write_text(before)


def test_an_admin_cancels_calls(page: Page, stack: Stack) -> None:
    """In the queue, whoever waits; in the fleet, what runs in a slot: the caller gets an error that says so."""
    told: list[str] = []

    def call(number: int) -> None:
        headers = {"x-request-id": f"{PROBE.replace(' ', '/')}-{number}"}
        with Client(stack.gateways[0].url, stack.key, headers=headers) as client:
            try:
                client.chat.completions.create(
                    [{"role": "user", "content": "Once"}], model="demo", max_tokens=3000, ignore_eos=True
                )
            except AnswerError as error:
                told.append(str(error.code))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]  # of a worker with four slots
    for thread in threads:
        thread.start()
    signed_in(page, stack, view="queue")
    listed = page.get_by_role("region", name="Calls")
    expect(listed.get_by_text("waits, place 1")).to_be_visible()
    waiting = listed.get_by_role("row").filter(has_text="waits").first
    waiting.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel the call").click()
    expect(listed.get_by_role("row").filter(has_text="waits")).to_have_count(1)
    open_view(page, "fleet")
    page.get_by_role("button", name="demo-0", exact=True).click()
    slots = page.get_by_role("region", name="Slots: demo-0")
    for _ in range(5):
        name = slots.locator(".id").first.text_content() or ""
        slots.get_by_role("button", name=f"Cancel {name}", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel the call").click()
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(slots.get_by_text(name, exact=True)).to_have_count(0)
    for thread in threads:
        thread.join(30)
    assert told == ["cancelled_by_admin"] * 6
    assert page.evaluate("window.struck") is None
    open_view(page, "access")
    page.get_by_role("tab", name="Audit").click()
    expect(page.locator("main")).to_contain_text("cancel call")


def test_a_worker_that_is_killed_leaves_the_page(page: Page, stack: Stack) -> None:
    process = stack.fake_worker("other", worker_id="other-0")
    signed_in(page, stack)
    expect(page.get_by_role("button", name="other-0", exact=True)).to_be_visible()
    process.kill()
    expect(page.get_by_role("button", name="other-0", exact=True)).to_have_count(0)


def test_a_streamed_chat(page: Page, stack: Stack) -> None:
    signed_in(page, stack, view="playground")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Message").fill("Who are you?")
    page.keyboard.press("Enter")
    answer = page.locator("article.assistant").last
    expect(answer).to_contain_text("demo model")
    expect(answer).to_contain_text("tokens/s")
    take(page, "playground")
    page.get_by_role("button", name="Show the code").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("curl http://127.0.0.1")
    dialog.get_by_role("button", name="Python").click()
    expect(dialog).to_contain_text("from openai import OpenAI")
    assert stack.key not in (dialog.text_content() or "")


def test_parameters_show_the_models_own_values(page: Page, stack: Stack) -> None:
    """Tools, a form and samplers go with the call; a field that nobody has filled shows what the model takes."""
    signed_in(page, stack, view="playground")
    page.get_by_text("Parameters", exact=True).click()
    expect(page.get_by_label("temperature")).to_have_attribute("placeholder", re.compile(r"^[0-9.]+$"))
    page.get_by_text("More samplers").click()
    expect(page.get_by_label("dry_base")).to_have_attribute("placeholder", re.compile(r"^[0-9.]+$"))
    page.get_by_label("max_tokens").fill("40")
    page.get_by_label("temperature").fill("0")
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"enum": [PROBE]}}}
    page.get_by_label("Response format (JSON)").fill(json.dumps(form))
    page.get_by_label("Message").fill("Say it.")
    page.get_by_role("button", name="Send").click()
    answer = page.locator("article.assistant").last
    expect(answer).to_contain_text(PROBE)
    page.get_by_label("Response format (JSON)").fill("")
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    page.get_by_label("Tools (JSON)").fill(json.dumps([tool]))
    page.get_by_role("button", name="Show the code").click()
    expect(page.get_by_role("dialog")).to_contain_text("look_up")
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.get_by_label("Message").fill("Look it up.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("article.assistant")).to_have_count(2)
    expect(page.locator("article.assistant").last).to_contain_text("tokens/s")
    assert page.evaluate("window.struck") is None


def test_two_models_side_by_side(page: Page, stack: Stack) -> None:
    signed_in(page, stack, view="playground")
    page.get_by_label("Compare with").select_option("gpt-4")
    page.get_by_label("Message").fill("Who are you?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("article.assistant")).to_have_count(2)
    for answer in page.locator("article.assistant").all():
        expect(answer).to_contain_text("tokens/s")


def test_an_answer_can_be_stopped(page: Page, stack: Stack) -> None:
    signed_in(page, stack, view="playground")
    page.get_by_text("Parameters", exact=True).click()
    page.get_by_label("Tools (JSON)").fill("{")
    page.get_by_label("Message").fill("Count.")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("is not JSON")


def test_a_key_is_made_used_and_deleted(page: Page, stack: Stack) -> None:
    signed_in(page, stack, view="access")
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("from-the-console")
    dialog.get_by_role("button", name="Make the key").click()
    expect(dialog).to_contain_text("shown this once")
    key = (dialog.locator("pre").text_content() or "").strip()
    dialog.get_by_role("button", name="Close").click()
    row = page.get_by_role("row", name=re.compile("from-the-console"))
    expect(row).to_be_visible()
    assert key not in page.content()
    with Client(stack.gateways[0].url, key) as client:
        until_served(client)
        row.get_by_role("button", name="Delete from-the-console").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(row).to_have_count(0)
        until_refused(client)
    for tab, part in (("Usage", "Calls"), ("Audit", "delete key from-the-console"), ("Teams", "default")):
        page.get_by_role("tab", name=tab).click()
        expect(page.locator("main")).to_contain_text(part)


def until_served(client: Client) -> None:
    ends = time.monotonic() + 10
    while True:
        try:
            client.models.list()
            return
        except AuthenticationFailed:
            assert time.monotonic() < ends
            time.sleep(0.1)


def until_refused(client: Client) -> None:
    ends = time.monotonic() + 10
    while time.monotonic() < ends:
        try:
            client.models.list()
        except AuthenticationFailed:
            return
        time.sleep(0.1)
    raise AssertionError("the key still works")


def test_who_is_no_admin_sees_what_is_theirs(page: Page, stack: Stack) -> None:
    made = page.request.post(
        f"{stack.gateways[0].url}/admin/keys",
        headers={"authorization": f"Bearer {stack.key}"},
        data={"name": "plain", "team": "default"},
    )
    key = made.json()["key"]
    with Client(stack.gateways[0].url, key) as client:
        until_served(client)
    signed_in(page, stack, key, view="health")
    assert page.locator("nav a").all_text_contents() == ["Playground", "Access", "Models"]


def test_other_pages_can_not_use_the_session(page: Page, stack: Stack) -> None:
    """A page of another origin makes the browser send requests with the cookie: none of them counts."""
    signed_in(page, stack)
    url = stack.gateways[0].url
    other = page.context.new_page()
    other.route("http://other.example/", lambda route: route.fulfill(body="<p>other</p>", content_type="text/html"))
    other.goto("http://other.example/")
    told = other.evaluate(
        """async (url) => {
            const asked = [["/admin/keys", "POST"], ["/ui/session", "GET"], ["/v1/chat/completions", "POST"]];
            return Promise.all(asked.map(([path, method]) =>
                fetch(url + path, {method, credentials: "include", body: method == "POST" ? "{}" : undefined})
                    .then((answer) => answer.status, () => "blocked")));
        }""",
        url,
    )
    assert set(told) <= {"blocked", 401, 403}, told


def test_names_that_callers_choose_are_text(page: Page, stack: Stack) -> None:
    process = stack.fake_worker(PROBE, worker_id="<b>worker")
    signed_in(page, stack)
    expect(page.locator("main")).to_contain_text(PROBE)
    expect(page.locator("main")).to_contain_text("<b>worker")
    open_view(page, "queue")
    page.get_by_label("Ask about a model").select_option(PROBE)
    expect(page.locator("main")).to_contain_text(f"Where a call of {PROBE} would go now")
    open_view(page, "playground")
    page.locator("aside select").first.select_option(PROBE)
    page.get_by_label("Message").fill(f"<script>window.struck=1</script>{PROBE}")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("article.user").last).to_contain_text("<script>window.struck=1</script>")
    assert page.evaluate("window.struck") is None
    process.stop()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(browser: Browser, stack: Stack, scheme: str) -> None:
    """axe finds nothing serious, and no view is wider than a narrow screen."""
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    page = signed_in(context.new_page(), stack)
    for view in VIEWS:
        open_view(page, view)
        page.wait_for_timeout(700)
        found = Axe().run(page).response["violations"]
        serious = [
            f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in ("serious", "critical")
        ]
        assert not serious, f"{view}: {serious}"
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
    context.close()


def test_it_can_be_used_by_keyboard(page: Page, stack: Stack) -> None:
    signed_in(page, stack)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    open_view(page, "access")
    page.get_by_role("tab", name="Keys").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Teams")).to_have_attribute("aria-selected", "true")


@pytest.mark.serial
def test_a_large_fleet_does_not_hold_the_page_up(page: Page, stack: Stack) -> None:
    """2,000 workers and 500 waiting calls: no task of the page takes more than 50 ms once it is there."""
    worker = {
        "address": "http://10.0.0.1:1",
        "started_at": 1.0,
        "is_draining": False,
        "slots": 8,
        "slots_busy": 3,
        "waiting": 0,
        "n_ctx": 8192,
        "kv_tokens": 65536,
        "kv_tokens_used": 10000,
        "backlog_tokens": 0,
        "prefill_ms": 0.5,
        "decode_ms": 20,
        "preempted": 0,
        "adapters": [],
        "adapters_resident": [],
        "circuit": "",
        "cache_ram_bytes": 1 << 30,
        "cache_disk_bytes": 0,
    }
    model = {
        "kind": "generate",
        "status": "loaded",
        "is_on_demand": False,
        "progress": None,
        "why": "",
        "retry_at": 0,
        "num_workers": 10,
        "slots": 80,
        "slots_busy": 30,
        "waiting": 3,
        "predicted_wait_s": 2.5,
        "aliases": [],
        "memory": {},
    }
    overview = {
        "at": 1000.0,
        "version": "0",
        "gateway": "g",
        "redis_up": True,
        "catalog_fault": "",
        "gateways": {},
        "models": {f"model-{number}": model for number in range(200)},
        "workers": {f"worker-{number}": {**worker, "model": f"model-{number % 200}"} for number in range(2000)},
        "machines": {},
    }
    call: dict[str, object] = {
        "team": PROBE,
        "key": PROBE,
        "alias": PROBE,
        "model": "model-7",
        "gateway": "g",
        "worker": "",
    }
    call |= {"status": "waiting", "since": 1000.0, "predicted_wait_s": 9.5, "priority": 0, "num_answers": 1}
    calls = [{**call, "request_id": f"{PROBE}-{number}", "position": number + 1} for number in range(500)]
    events = [f"event: overview\ndata: {json.dumps(overview)}\n\n"]
    for second in range(1, 20):
        rows = {f"worker-{number}": {"slots_busy": (number + second) % 8} for number in range(0, 2000, 4)}
        events.append(f"event: changes\ndata: {json.dumps({'at': 1000.0 + second, 'workers': rows})}\n\n")

    def answer(route: Route) -> None:
        route.fulfill(body="".join(events), content_type="text/event-stream")

    page.context.route("**/admin/events*", answer)
    page.context.route("**/admin/calls", lambda route: route.fulfill(json={"data": calls, "silent": []}))
    page.add_init_script(
        "window.tasks = []; new PerformanceObserver((list) => list.getEntries().forEach("
        "(entry) => window.tasks.push(entry.duration))).observe({type: 'longtask'});"
    )
    signed_in(page, stack)
    expect(page.get_by_role("region", name="Workers")).to_contain_text("worker-0")
    page.wait_for_timeout(1500)
    page.get_by_label("Filter by model or worker").fill("model-7")
    assert (longest := longest_task_ms(page)) <= MOST_MS, f"{longest:.0f} ms"
    open_view(page, "queue")
    expect(page.get_by_role("region", name="Calls")).to_contain_text(f"{PROBE}-49")
    assert (longest := longest_task_ms(page)) <= MOST_MS, f"{longest:.0f} ms in the queue"
    assert page.evaluate("window.struck") is None


def longest_task_ms(page: Page) -> float:
    """The longest task of some seconds, in which what the server sends comes again; of three tries the best, since a
    task is also long while the machine does something else."""
    longest: list[float] = []
    while len(longest) < 3 and (not longest or longest[-1] > MOST_MS):
        page.evaluate("window.tasks.length = 0")
        page.wait_for_timeout(6000)
        longest.append(float(max(page.evaluate("window.tasks"), default=0)))
    return min(longest)
