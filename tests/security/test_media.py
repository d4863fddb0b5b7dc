"""A thousand files that no library wrote, sent as pictures and sounds, beside the stream of another team."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import aiohttp
import pytest
from PIL import Image

from accounts.protocol.records import digest
from tests.security.fleet import ATTACKER_KEY, KEYS, SEES, VICTIM_KEY
from tests.security.victim import feel
from tests.support.media_files import PICTURE_FORMS, SOUND_FORMS, mutated, picture_file, png, sound_file, tone
from tests.support.projectors import phi4, picture, ultravox, write_projector
from tests.support.small_models import llama, write_model
from tests.support.stack import DEMO_MODEL, Stack

NUM_FILES, AT_ONCE = 1000, 2
MOST_S = 2.0
"""In which a caller is told that a file is none. What is read may take longer: it is answered."""
GAP_S = 1.0
SMALL_BYTES = 1 << 16
"""Larger files are sent once."""
SEER, HEARER = "seer", "hearer"
TEMPLATE = DEMO_MODEL.with_name("chat_template.jinja")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        sees, hears = running.folder / "mmproj-sees.gguf", running.folder / "mmproj-hears.gguf"
        text = running.folder / "text.gguf"
        write_projector(sees, partial(phi4, sizes=SEES, least=16, most=64))
        write_projector(hears, ultravox)
        write_model(text, "llama", llama)
        more: dict[str, Any] = {"slots": 4, "wait": False}
        running.worker(DEMO_MODEL, SEER, worker_id=SEER, projector=sees, **more)
        template = TEMPLATE.read_text()
        running.worker(text, HEARER, worker_id=HEARER, projector=hears, chat_template=template, **more)
        records = [{"name": name, "team": team, "sha256": digest(key)} for name, team, key in KEYS]
        gateway = running.gateway(wait=False, api_keys=json.dumps(records))
        for alias, process in zip((SEER, HEARER), running.workers, strict=True):
            running.wait_for_worker(alias, alias, process)
        running.wait_until_ready(gateway)
        running.wait_until_listed(gateway, SEER, HEARER)
        yield running


def pictures() -> list[bytes]:
    """Return whole files, and hostile ones: with lying heads, without pixels, of odd shapes."""
    seen = Image.fromarray(picture(1, 60, 80))
    whole = [picture_file(seen, form) for form in PICTURE_FORMS]
    thin = [picture_file(Image.fromarray(picture(2, *size)), "PNG") for size in ((1, 200), (1, 201), (4000, 20))]
    lies = [png(side, side, bytes(4096)) for side in (0, 1, 4096, 8192, 1 << 16, (1 << 31) - 1)]
    return [*whole, *thin, *lies, png(8192, 4095, bytes(4095 * (1 + 3 * 8192)))]


def sounds() -> list[bytes]:
    whole = [sound_file(tone(0.5, 16_000), 16_000, form, code) for form, code in SOUND_FORMS]
    return [*whole, sound_file(tone(0.5, 8_000), 8_000), sound_file(tone(0.05, 16_000), 16_000)]


def bodies() -> Iterator[dict[str, Any]]:
    """Yield requests, each with a file of its own: changed at random, but for the hostile ones."""
    seen, heard = pictures(), sounds()
    for seed in range(NUM_FILES):
        is_sound = seed % 4 == 3
        files = heard if is_sound else seen
        number = seed // 4 if is_sound else seed - seed // 4
        if number < len(files):
            data = files[number]
        else:
            small = [one for one in files if len(one) < SMALL_BYTES]
            data = mutated(small[number % len(small)], seed)
        text = base64.b64encode(data).decode()
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}
        told = {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}
        message = {"role": "user", "content": [{"type": "text", "text": "?"}, told if is_sound else shown]}
        yield {"model": HEARER if is_sound else SEER, "messages": [message], "max_tokens": 2}


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(600)
async def test_a_thousand_files_disturb_nobody(stack: Stack) -> None:
    ended: Counter[int] = Counter()
    wrong: list[object] = []
    url, left = f"{stack.gateways[0].url}/v1/chat/completions", bodies()
    headers = {"Authorization": f"Bearer {ATTACKER_KEY}"}

    async def send(session: aiohttp.ClientSession) -> None:
        for body in left:
            began = time.monotonic()
            async with session.post(url, json=body) as response:
                answer = await response.json()
            took_s = time.monotonic() - began
            ended[response.status] += 1
            if response.status != 200 and (response.status != 400 or took_s > MOST_S):
                wrong.append((response.status, took_s, answer))
            if response.status == 400 and not (answer["error"]["message"] and answer["error"]["param"]):
                wrong.append(answer)

    is_over = False
    victim = asyncio.create_task(feel(stack.gateways[0].url, VICTIM_KEY, SEER, lambda: is_over))
    async with aiohttp.ClientSession(headers=headers) as session:
        await asyncio.gather(*(send(session) for _ in range(AT_ONCE)))
    is_over = True
    felt = await victim
    assert not wrong, wrong[:5]
    assert sum(ended.values()) == NUM_FILES
    assert min(ended[200], ended[400]) > NUM_FILES / 10
    assert all(worker.popen.poll() is None for worker in stack.workers)
    assert felt.num_streams
    assert not felt.errors
    assert felt.seen_gap_s < GAP_S
