"""The fleet that is attacked when no address is given: Redis, a gateway, and a worker whose demo model also sees."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from accounts.protocol.records import digest
from tests.security.attack import Fleet, Target
from tests.support.projectors import Sizes, phi4, write_projector
from tests.support.small_models import with_pre_tokenizer, write_wide_model
from tests.support.stack import DEMO_MODEL, Stack
from tests.support.tls_proxy import make_certificates

MODEL = "paddock-demo"
ATTACKER_KEY, VICTIM_KEY = "pk-attacker-0123456789abcdef", "pk-victim-0123456789abcdef"
KEYS = (("attacker", "red", ATTACKER_KEY), ("victim", "blue", VICTIM_KEY))
DEMO_TEMPLATE = DEMO_MODEL.with_name("chat_template.jinja")
SLOTS = 4
CACHE_RAM_MIB = 8
"""What answers leave in RAM for those who come after is no leak: little of it shows what is."""
REGEX_PRE_TOKENIZER = "tekken"
"""One that llama.cpp runs by std::regex, which ends a process over a long run of like characters."""


SEES = Sizes(width=384, n_head=6, n_ff=1536, n_layer=12, patch=16, n_embd=192)
LEAST_CELLS, MOST_CELLS = 16, 64
"""Of a picture. Encoding one takes some hundredths of a second."""

NUM_TOKENS = 150_000
"""Of the wide model's vocabulary."""
QUADRATIC = (
    "{% for one in messages %}{% for other in messages %}{% if one.content is none and other.content is none %} "
    "{% endif %}{% endfor %}{% endfor %}"
)
"""Stands before the chat template: rendering takes time with the square of the messages, as some families' does."""


@contextlib.contextmanager
def attacked_fleet(kind: Fleet = Fleet.PLAIN, *, measured: bool = False) -> Iterator[tuple[Target, dict[str, int]]]:
    """Start it; yields what is aimed at and the ids of its processes by name. Server and load get a core each."""
    cores = sorted(os.sched_getaffinity(0))
    served_by = str(cores[0]) if len(cores) > 1 else ""
    pinned = {name: served_by for name in ("redis", "gateway", "worker") if served_by}
    records = [{"name": name, "team": team, "sha256": digest(key)} for name, team, key in KEYS]
    with Stack(cores=pinned, measured=measured) as stack:
        model = stack.folder / "demo.gguf"
        sight: dict[str, Any] = {}
        if kind is Fleet.WIDE:
            write_wide_model(model, NUM_TOKENS, pre=REGEX_PRE_TOKENIZER)
        else:
            with_pre_tokenizer(DEMO_MODEL, model, REGEX_PRE_TOKENIZER)
            projector = stack.folder / "mmproj.gguf"
            write_projector(projector, partial(phi4, sizes=SEES, least=LEAST_CELLS, most=MOST_CELLS))
            sight["projector"] = projector
        worker = stack.worker(
            model,
            MODEL,
            slots=SLOTS,
            slot_save_dir=stack.folder / "slots",
            cache_ram_mib=CACHE_RAM_MIB,
            chat_template=QUADRATIC + DEMO_TEMPLATE.read_text(),
            **sight,
        )
        authority, files = "", dict[str, Any]()
        if kind is Fleet.ENCRYPTED:
            made = make_certificates(stack.folder)
            authority, files = str(made.ca), {"tls_cert": made.server, "tls_key": made.server_key}
        gateway = stack.gateway(api_keys=json.dumps(records), **files)
        target = Target(gateway.url, MODEL, ATTACKER_KEY, VICTIM_KEY, worker.url, authority)
        yield target, {"gateway": gateway.pid, "worker": worker.pid, "redis": stack.redis.pid}
