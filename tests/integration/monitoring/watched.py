"""A whole Paddock that a Prometheus watches by the shipped configuration and rules, only sooner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support.prometheus import Prometheus, replaced
from tests.support.stack import DEMO_MODEL, Stack, free_port
from tests.support.teams_at_work import Team, keys_of

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
RULES = ROOT / "helm" / "files" / "rules"
MODEL, ASLEEP = "demo", "asleep"
TEAMS = (Team("red", 10), Team("blue", 5), Team("green", 2))
SCRAPE = "1s"
METRICS_KEY = "mk-0123456789"


@dataclass(frozen=True, slots=True)
class Watched:
    stack: Stack
    prometheus: Prometheus

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(gateway.url for gateway in self.stack.gateways)


@contextmanager
def watched(folder: Path, *, waits: str = SCRAPE) -> Iterator[Watched]:
    """Two gateways, an accounts service, two workers of the demo model with both tiers of cache; a model without one.

    `waits`: takes the place of every alert's `for`; their expressions are as they are shipped.
    """
    catalog = folder / "catalog.yaml"
    models = [
        {"name": name, "path": str(DEMO_MODEL), "workers": workers} for name, workers in ((MODEL, 1), (ASLEEP, 0))
    ]
    catalog.write_text(yaml.safe_dump({"models": models}))
    listen = f"127.0.0.1:{free_port()}"
    with Stack() as stack:
        stack.accounts(accounts_listen=listen, wait=False)
        for number in range(2):
            cache = folder / f"cache-{number}"
            stack.worker(DEMO_MODEL, MODEL, slots=4, ctx=512, kv_tokens=768, cache_dir=cache, wait=False)
        for _ in range(2):
            stack.gateway(
                catalog=catalog,
                accounts_url=f"http://{listen}",
                api_keys=keys_of(TEAMS),
                metrics_key=METRICS_KEY,
                wait=False,
            )
        for number, process in enumerate(stack.workers):
            process.url = stack.wait_for_worker(MODEL, f"worker-{number}", process).address
        for gateway in stack.gateways:
            stack.wait_until_ready(gateway)
        rules = _hasty_rules(folder, waits)
        with Prometheus(folder, lambda port: _config(stack, rules, listen, port)) as prometheus:
            yield Watched(stack, prometheus)


def _hasty_rules(folder: Path, waits: str) -> Path:
    made = folder / "rules"
    made.mkdir()
    for file in RULES.glob("*.yaml"):
        document = yaml.safe_load(file.read_text())
        for group in document["groups"]:
            group.pop("interval", None)
            for rule in group["rules"]:
                if "for" in rule:
                    rule["for"] = waits
        (made / file.name).write_text(yaml.safe_dump(document))
    return made


def _config(stack: Stack, rules: Path, accounts: str, port: int) -> str:
    key_file = rules / "metrics_key"
    key_file.write_text(METRICS_KEY)
    hosts = [gateway.url.removeprefix("http://") for gateway in stack.gateways]
    changes = {
        "accounts:8082": accounts,
        "[gateway:8080]": f"[{', '.join(hosts)}]",
        "http://gateway:8080": f"http://{hosts[0]}",
        "localhost:9090": f"127.0.0.1:{port}",
        "/etc/prometheus/rules": str(rules),
        "/tmp/metrics_key": str(key_file),
        "15s": SCRAPE,
    }
    return replaced(CONFIG.read_text(), changes)
