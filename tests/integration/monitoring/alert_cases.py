"""For each alert: series on which it fires, with the words that it says, and series on which it stays silent.

Series are in promtool's notation, `0+6x80` is 0, 6, 12 ... 480, `1x20` is 21 times 1; a sample a minute, or as
`every` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Series = dict[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """One alert at one time."""

    alert: str
    at: str
    """When it is looked at, from the first sample on."""
    series: Series
    summary: str = ""
    """What it says; empty: it does not fire."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the alert, beside its severity."""
    every: str = "1m"
    """Time between two samples, and between two looks at the rules."""


M = {"model": "m"}
CALLS = {'paddock_e2e_seconds_count{model="m"}': "0+60x500"}
QUESTIONS = {'paddock_requests_total{model="m", outcome="ok"}': "0+6000x500"}
"""With the calls: most ask for numbers of tokens."""


def failing(per_minute: str, who: str = "worker") -> Series:
    return CALLS | {f'paddock_failures_total{{model="m", who="{who}", code="worker_lost"}}': per_minute}


def first_tokens(in_time: str) -> Series:
    """Of 60 a minute."""
    return {
        'paddock_ttft_seconds_bucket{model="m", le="5.0"}': in_time,
        'paddock_ttft_seconds_count{model="m"}': "0+60x500",
    }


def fleet(waiting: str, workers: str, draining: str) -> Series:
    return {
        'paddock_queue_length{model="m", instance="a"}': waiting,
        'paddock_workers{model="m", instance="a"}': workers,
        'paddock_workers_draining{model="m", instance="a"}': draining,
    }


def slow(histogram: str, below: str, all_: str) -> Series:
    """A histogram of one gateway: those below 0.1 s, and all, which are below 0.25 s."""
    return {
        f'{histogram}_bucket{{instance="g:8080", le="0.1"}}': below,
        f'{histogram}_bucket{{instance="g:8080", le="0.25"}}': all_,
        f'{histogram}_bucket{{instance="g:8080", le="+Inf"}}': all_,
    }


def redis_up(first: str, second: str) -> Series:
    return {'paddock_redis_up{instance="a"}': first, 'paddock_redis_up{instance="b"}': second}


def up(samples: str, job: str = "paddock-worker", instance: str = "w:8081") -> Series:
    return {f'up{{job="{job}", instance="{instance}"}}': samples}


BUILD = {'paddock_build_info{version="1", job="paddock-gateway", instance="g:8080"}': "1x60"}
STARTS = {'process_start_time_seconds{job="paddock-gateway", instance="g:8080"}': "100x5 200x5 300x5 400x30"}
G = {"instance": "g:8080"}
A = {"instance": "a"}
W = {"job": "paddock-worker", "instance": "w:8081"}
W_DOWN = "paddock-worker at w:8081 does not answer Prometheus"

DOWN = (
    Case("PaddockGatewaysDown", "2m", {"up": "0x20"}, "No gateway answers Prometheus"),
    Case("PaddockGatewaysDown", "2m", BUILD),
    Case(
        "PaddockNoWorker",
        "11m",
        fleet("2x20", "0x20", "0x20"),
        "m: up to 2 calls wait, and no worker takes them",
        M,
    ),
    Case(
        "PaddockNoWorker",
        "11m",
        fleet("0 3 0 0 3 0 0 3 0 0 3 3", "1x20", "1x20"),
        "m: up to 3 calls wait, and no worker takes them",
        M,
    ),
    Case("PaddockNoWorker", "9m", fleet("2x20", "0x20", "0x20")),
    Case("PaddockNoWorker", "15m", fleet("2x20", "2x20", "1x20")),
    Case("PaddockNoWorker", "15m", fleet("0x20", "0x20", "0x20")),
    Case("PaddockRedisAway", "6m", redis_up("0x20", "0x20"), "No gateway reaches Redis"),
    Case("PaddockRedisAway", "6m", redis_up("0x20", "1x20")),
    Case(
        "PaddockTargetDown",
        "6m",
        up("0x20", "paddock-gateway", "g:8080"),
        "paddock-gateway at g:8080 does not answer Prometheus",
        {"job": "paddock-gateway", **G},
    ),
    Case("PaddockTargetDown", "7m", up("1 0x20"), W_DOWN, W),
    Case("PaddockTargetDown", "55m", up("1x5 0x60"), W_DOWN, W),
    Case("PaddockTargetDown", "34m", up("0x60")),
    Case("PaddockTargetDown", "36m", up("0x60"), W_DOWN, W),
    Case("PaddockTargetDown", "36m", up("0x28 1x20")),
    Case("PaddockTargetDown", "6m", up("0x20", "node", "n:9100")),
)

OBJECTIVES = (
    Case("PaddockErrorsBurnFast", "70m", QUESTIONS | failing("0+12x80"), "m: 20% of calls failed in the last hour", M),
    Case("PaddockErrorsBurnFast", "70m", failing("0+120x80"), "m: 100% of calls failed in the last hour", M),
    Case(
        "PaddockErrorsBurnFast",
        "70m",
        {
            'paddock_requests_total{model="", outcome="store_unavailable"}': "0+1x80",
            'paddock_failures_total{model="", who="gateway", code="store_unavailable"}': "0+1x80",
        },
        "no model: 100% of calls failed in the last hour",
    ),
    Case("PaddockErrorsBurnFast", "70m", failing("0+12x80", who="caller")),
    Case("PaddockErrorsBurnFast", "70m", failing("0+12x60 720x20")),
    Case(
        "PaddockErrorsBurnFast",
        "70m",
        {
            'paddock_e2e_seconds_count{model="m"}': "0+0.1x80",
            'paddock_failures_total{model="m", who="worker", code="worker_lost"}': "0+0.1x80",
        },
    ),
    Case(
        "PaddockErrorsBurn", "200m", failing("0+4.8x420"), "m: 8% of calls failed in the last six hours", M, every="5m"
    ),
    Case("PaddockErrorsBurn", "200m", failing("0+3x420"), every="5m"),
    Case(
        "PaddockErrorsBurnSlow",
        "4h",
        failing("0+1.2x500", who="gateway"),
        "m: 2% of calls failed in the last three days",
        M,
        every="5m",
    ),
    Case("PaddockErrorsBurnSlow", "4h", failing("0+0.3x500"), every="5m"),
    Case(
        "PaddockFirstTokensBurnFast",
        "70m",
        first_tokens("0+12x80"),
        "m: 80% of first tokens came later than 5 s in the last hour",
        M,
    ),
    Case("PaddockFirstTokensBurnFast", "70m", first_tokens("0+30x80")),
    Case(
        "PaddockFirstTokensBurn",
        "200m",
        first_tokens("0+36x420"),
        "m: 40% of first tokens came later than 5 s in the last six hours",
        M,
        every="5m",
    ),
    Case("PaddockFirstTokensBurn", "200m", first_tokens("0+48x420"), every="5m"),
    Case(
        "PaddockFirstTokensBurnSlow",
        "4h",
        first_tokens("0+54x500"),
        "m: 10% of first tokens came later than 5 s in the last three days",
        M,
        every="5m",
    ),
    Case("PaddockFirstTokensBurnSlow", "4h", first_tokens("0+58x500"), every="5m"),
)

ONE, NONE = {'paddock_workers{model="m"}': "1x40"}, {'paddock_workers{model="m"}': "0x40"}

LINE = (
    Case(
        "PaddockQueueOld",
        "6m",
        ONE | {'paddock_queue_oldest_seconds{model="m"}': "50x20"},
        "m: the oldest call has waited 50s",
        M,
    ),
    Case("PaddockQueueOld", "6m", ONE | {'paddock_queue_oldest_seconds{model="m"}': "50x3 10 50x20"}),
    Case("PaddockQueueOld", "6m", NONE | {'paddock_queue_oldest_seconds{model="m"}': "50x20"}),
    Case(
        "PaddockWaitPredictedLong",
        "20m",
        ONE | {'paddock_predicted_wait_seconds{model="m"}': "40x30"},
        "m: a new call would wait 40s",
        M,
    ),
    Case("PaddockWaitPredictedLong", "20m", ONE | {'paddock_predicted_wait_seconds{model="m"}': "20x30"}),
    Case("PaddockWaitPredictedLong", "20m", NONE | {'paddock_predicted_wait_seconds{model="m"}': "40x30"}),
    Case(
        "PaddockCallsTurnedAway",
        "40m",
        QUESTIONS | CALLS | {'paddock_failures_total{model="m", who="policy", code="queue_full"}': "0+6x60"},
        "m: 10% of calls are turned away",
        M,
    ),
    Case(
        "PaddockCallsTurnedAway",
        "40m",
        CALLS | {'paddock_failures_total{model="m", who="policy", code="queue_full"}': "0+1x60"},
    ),
)

WORKERS = (
    Case(
        "PaddockWorkersCrash",
        "25m",
        {'paddock_worker_losses_total{model="m", how="lost"}': "0x20 1 2 3 4x10"},
        "m: 4 worker processes were lost in a quarter of an hour",
        M,
    ),
    Case("PaddockWorkersCrash", "25m", {'paddock_worker_losses_total{model="m", how="drained"}': "0x20 1 2 3 4x10"}),
    Case("PaddockWorkersCrash", "25m", {'paddock_worker_losses_total{model="m", how="lost"}': "0x20 1 2x10"}),
    Case(
        "PaddockProcessRestarts",
        "22m",
        STARTS | BUILD,
        "paddock-gateway at g:8080 has restarted 3 times in half an hour",
        {"job": "paddock-gateway", **G},
    ),
    Case("PaddockProcessRestarts", "22m", STARTS),
    Case(
        "PaddockCircuitOpen",
        "16m",
        {'paddock_circuits{model="m"}': "1 0 0 1 0 0 1 0 0 1 0 0 1 0 0 1 1"},
        "m: 1 workers are left alone because their calls fail",
        M,
    ),
    Case("PaddockCircuitOpen", "16m", {'paddock_circuits{model="m"}': "1x3 0x20"}),
    Case(
        "PaddockKvFull",
        "40m",
        {'vllm:kv_cache_usage_perc{model_name="m", worker="w"}': "0.95x60"},
        "m: running calls hold 95% of the KV cells",
        {"model_name": "m"},
    ),
    Case(
        "PaddockKvFull",
        "40m",
        {
            'vllm:kv_cache_usage_perc{model_name="m", worker="w"}': "0.95x60",
            'vllm:kv_cache_usage_perc{model_name="m", worker="v"}': "0.5x60",
        },
    ),
    Case(
        "PaddockPreemptions",
        "35m",
        {
            'vllm:num_preemptions_total{model_name="m"}': "0+6x60",
            'vllm:request_success_total{model_name="m", finished_reason="stop"}': "0+20x60",
        },
        "m: 0.30 preemptions per call",
        {"model_name": "m"},
    ),
    Case(
        "PaddockPreemptions",
        "35m",
        {
            'vllm:num_preemptions_total{model_name="m"}': "0+1x60",
            'vllm:request_success_total{model_name="m", finished_reason="stop"}': "0+20x60",
        },
    ),
    Case(
        "PaddockDiskTierFails",
        "31m",
        {'paddock_cache_disk_blocks_total{model_name="m", worker="w", outcome="refused"}': "0x20 5 10x20"},
        "m: w lost 10 blocks of its disk tier (refused)",
        {"model_name": "m", "worker": "w", "outcome": "refused"},
    ),
    Case(
        "PaddockDiskTierFails",
        "31m",
        {'paddock_cache_disk_blocks_total{model_name="m", worker="w", outcome="written"}': "0x20 5 10x20"},
    ),
)

LEASES = (
    Case(
        "PaddockLeasesLost",
        "31m",
        {'paddock_leases_lost_total{model="m", why="expired"}': "0x20 8x20"},
        "m: 8 leases were lost (expired) in half an hour",
        {"model": "m", "why": "expired"},
    ),
    Case("PaddockLeasesLost", "31m", {'paddock_leases_lost_total{model="m", why="void"}': "0x20 8x20"}),
    Case(
        "PaddockLeaseLeak",
        "20m",
        {'paddock_leases{model="m"}': "2x30", 'paddock_requests_in_flight{model="m"}': "1x30"},
        "m: 2 slots are held for fewer calls",
        M,
    ),
    Case(
        "PaddockLeaseLeak",
        "20m",
        {'paddock_leases{model="m"}': "2x30", 'paddock_requests_in_flight{model="m"}': "1x10 2 1x20"},
    ),
    Case(
        "PaddockSlotLeak",
        "20m",
        {'paddock_slots_busy{model="m"}': "3x30", 'paddock_leases{model="m"}': "2x30"},
        "m: workers compute 3 calls, gateways hold fewer slots",
        M,
    ),
    Case(
        "PaddockSlotLeak", "20m", {'paddock_slots_busy{model="m"}': "3x10 2 3x20", 'paddock_leases{model="m"}': "2x30"}
    ),
)

GATEWAYS = (
    Case(
        "PaddockGatewayWithoutRedis",
        "6m",
        redis_up("0x20", "1x20"),
        "a does not reach Redis, others do",
        {"instance": "a"},
    ),
    Case("PaddockGatewayWithoutRedis", "6m", redis_up("0x20", "0x20")),
    Case(
        "PaddockPlacedWithoutRedis",
        "6m",
        {'paddock_without_redis{model="m"}': "1x20"} | redis_up("1x20", "1x20"),
        "m: calls are placed without Redis",
        M,
    ),
    Case("PaddockPlacedWithoutRedis", "6m", {'paddock_without_redis{model="m"}': "1x20"} | redis_up("0x20", "0x20")),
    Case(
        "PaddockRedisSlow",
        "20m",
        slow("paddock_redis_seconds", "0+10x30", "0+20x30"),
        "Redis takes 247ms for 1 in 100 scripts of g:8080",
        G,
    ),
    Case("PaddockRedisSlow", "20m", slow("paddock_redis_seconds", "0+20x30", "0+20x30")),
    Case(
        "PaddockRedisUnreadable",
        "20m",
        {'paddock_redis_unreadable_total{key="pd:keys", instance="a"}': "0+1x30"},
        "Something under pd:keys in Redis can not be read",
        {"key": "pd:keys"},
    ),
    Case("PaddockRedisUnreadable", "35m", {'paddock_redis_unreadable_total{key="pd:keys", instance="a"}': "0 0 3x40"}),
    Case(
        "PaddockLoopLate",
        "20m",
        slow("paddock_loop_lag_seconds", "0+10x30", "0+20x30"),
        "g:8080: timers fire 247ms late, 1 in 100",
        G,
    ),
    Case("PaddockLoopLate", "20m", slow("paddock_loop_lag_seconds", "0+20x30", "0+20x30")),
)

ACCOUNTS_UP = 'up{job="paddock-accounts", instance="accounts:8082"}'
STREAM, BOUND = 'paddock_usage_stream_entries{instance="a"}', 'paddock_usage_stream_max_entries{instance="a"}'
DROPPED = 'paddock_usage_records_total{what="dropped", instance="a"}'
GIVEN_UP = 'paddock_webhook_tries_total{outcome="given_up"}'

ACCOUNTS = (
    Case("PaddockAccountsAway", "20m", {ACCOUNTS_UP: "1x5 0x60"}, "No accounts service answers Prometheus"),
    Case("PaddockAccountsAway", "40m", {ACCOUNTS_UP: "1x5 _x60"}, "No accounts service answers Prometheus"),
    Case("PaddockAccountsAway", "20m", up("1x60", "paddock-gateway")),
    Case("PaddockAccountsAway", "20m", {ACCOUNTS_UP: "1x5 0x60"} | up("1x60", "paddock-accounts", "b:8082")),
    Case(
        "PaddockUsageWaits",
        "20m",
        {'paddock_usage_waiting_seconds{instance="a"}': "0+60x30"},
        "Usage has waited for 20m 0s to be written to the database",
    ),
    Case("PaddockUsageWaits", "20m", {'paddock_usage_waiting_seconds{instance="a"}': "0 60 120 180 240 0x30"}),
    Case(
        "PaddockUsageStreamFull",
        "20m",
        {STREAM: "850x30", BOUND: "1000x30"},
        "The stream of usage in Redis is 85% full",
    ),
    Case("PaddockUsageStreamFull", "20m", {STREAM: "750x30", BOUND: "1000x30"}),
    Case("PaddockUsageStreamFull", "20m", {STREAM: "0x30", BOUND: "0x30"}),
    Case("PaddockUsageDropped", "31m", {DROPPED: "0x20 30x20"}, "a dropped 30 records of calls in half an hour", A),
    Case("PaddockUsageDropped", "31m", {DROPPED: "30x60"}),
    Case(
        "PaddockUsageSetAside",
        "20m",
        {'paddock_usage_set_aside_entries{instance="a"}': "2x30"},
        "2 entries of usage can not be written and are set aside",
    ),
    Case("PaddockUsageSetAside", "20m", {'paddock_usage_set_aside_entries{instance="a"}': "0x30"}),
    Case(
        "PaddockWebhooksGivenUp",
        "60m",
        {GIVEN_UP: "0x20 4x60"},
        "4 events were given up within a day: the webhook did not take them",
    ),
    Case("PaddockWebhooksGivenUp", "60m", {GIVEN_UP: "4x80"}),
)

CASES = (*DOWN, *OBJECTIVES, *LINE, *WORKERS, *LEASES, *GATEWAYS, *ACCOUNTS)
