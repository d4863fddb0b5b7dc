"""Conversations of a worker that is replaced go on at its successor, where both share a folder for prompts."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.integration.supervisor.conftest import Catalog, Programs, wait_until
from tests.integration.supervisor.test_up import port_of

OPENING = "Once upon a time Tom and Anna lived in a little house at the edge of a big forest with their cat. " * 8
BLOCK_TOKENS = 64


def next_turn(programs: Programs, catalog: Catalog, **environment: str) -> tuple[int, Any]:
    """Return the tokens that were computed before a worker was replaced, and the answer of its successor to the next
    turn."""
    sizes: dict[str, Any] = {"ctx": 512, "kv_tokens": 1024, "llama": {"n_threads": 1}, "residency": {"min": 1}}
    catalog.write(catalog.entry("tale", **sizes, slots=2))
    up = programs.start("up", "--port", "0", "--catalog", str(catalog.file), PADDOCK_CACHE_RAM_MIB="8", **environment)
    up.until("Ctrl-C stops everything")
    headers = {"Authorization": f"Bearer {(up.state / 'first-key').read_text().strip()}"}
    with httpx2.Client(base_url=f"http://127.0.0.1:{port_of(up)}", headers=headers, timeout=400) as http:

        def complete(prompt: str) -> Any:
            body = {"model": "tale", "prompt": prompt, "n_predict": 16, "temperature": 0}
            return http.post("/completion", json=body).raise_for_status().json()

        first = complete(OPENING)
        catalog.write(catalog.entry("tale", **sizes, slots=3))
        wait_until(lambda: "leaves: a worker with the new settings" in up.text(), up.text)
        wait_until(lambda: not up.worker_pid("worker-0"), up.text)
        after = complete(OPENING + first["content"] + " Then one day")
    assert up.stop() == 0, up.text()
    return int(first["tokens_evaluated"] + first["tokens_predicted"]) - 1, after


@pytest.mark.parametrize("has_folder", [True, False])
def test_the_next_turn(programs: Programs, model: Any, has_folder: bool) -> None:
    folder = programs.folder / "cache"
    shared = {"PADDOCK_CACHE_DIR": str(folder)} if has_folder else {}
    num_before, answer = next_turn(programs, Catalog(programs.folder / "catalog.json", model), **shared)
    num_cached = answer["timings"]["cache_n"]
    print(f"\n{num_cached} of {answer['tokens_evaluated']} prompt tokens were cached")
    assert num_cached == (num_before // BLOCK_TOKENS * BLOCK_TOKENS if has_folder else 0)
    assert folder.exists() == has_folder
