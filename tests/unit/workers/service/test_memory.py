from __future__ import annotations

import pytest

from workers.footprint.devices import free_bytes
from workers.footprint.kv_plan import WORKER_SHARE, KvShape, outputs_too_large, plan_kv, share
from workers.models.spec import MAX_KV_TOKENS


def test_what_a_token_takes() -> None:
    shape = KvShape([2, 2, 2], key_length=64, value_length=32)
    assert shape.bytes_per_token("f16", "f16") == 3 * 2 * (64 + 32) * 2
    assert shape.bytes_per_token("q8_0", "f32") == 3 * 2 * (64 * 34 / 32 + 32 * 4)


@pytest.mark.parametrize(
    ("kv_tokens", "free", "expected"),
    [
        (0, None, (1000, 4000)),
        (0, 1 << 40, (1000, 4000)),
        (0, int(2000 * 1024 / WORKER_SHARE) + 1, (1000, 2000)),
        (0, int(600 * 1024 / WORKER_SHARE) + 1, (600, 600)),
        (0, 0, (256, 256)),
        (3000, 0, (1000, 3000)),
        (500, None, (500, 500)),
    ],
)
def test_the_cache_shrinks_to_what_fits(kv_tokens: int, free: int | None, expected: tuple[int, int]) -> None:
    plan = plan_kv(slots=4, n_ctx=1000, kv_tokens=kv_tokens, bytes_per_token=1024, free_bytes=free, workers=2)
    assert (plan.n_ctx, plan.kv_tokens) == expected
    assert bool(plan.reason) == (expected not in ((1000, 4000), (1000, 3000)))


def test_the_workers_of_a_machine_share_its_memory() -> None:
    assert share(1) == share(2) == WORKER_SHARE
    for workers in (1, 2, 3, 8, 256):
        assert workers * share(workers) <= 0.8 + 1e-9
    free = 1 << 30
    plans = [
        plan_kv(slots=8, n_ctx=100_000, kv_tokens=0, bytes_per_token=1024, free_bytes=free, workers=workers)
        for workers in (2, 8)
    ]
    assert plans[0].kv_tokens == pytest.approx(4 * plans[1].kv_tokens, rel=0.01)
    assert "for 8 workers" in plans[1].reason


def test_cells_are_counted_in_32_bits() -> None:
    plan = plan_kv(slots=256, n_ctx=2**24, kv_tokens=0, bytes_per_token=1.0, free_bytes=None, workers=1)
    assert (plan.n_ctx, plan.kv_tokens) == (2**24, MAX_KV_TOKENS)


def test_this_machine_has_memory() -> None:
    free = free_bytes()
    assert free is None or 1 << 20 < free < 1 << 50


def test_a_micro_batch_whose_outputs_do_not_fit_is_told_with_both_sizes() -> None:
    gib = 1 << 30
    assert outputs_too_large(n_vocab=250_000, n_ubatch=512, free_bytes=gib) == ""
    assert outputs_too_large(n_vocab=250_000, n_ubatch=8192, free_bytes=None) == ""
    told = outputs_too_large(n_vocab=250_000, n_ubatch=8192, free_bytes=4 * gib)
    for part in ("n_ubatch", "8,192 tokens", "7,812 MiB", "4,096 MiB", "lower"):
        assert part in told
