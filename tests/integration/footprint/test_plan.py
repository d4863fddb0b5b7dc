"""`paddock models plan`: what would run where, before anything does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.device_hosts import gpu_host
from tests.support.stack import DEMO_MODEL, ROOT
from workers.commands.models.plan import as_text, planned
from workers.footprint.learned import FILE, Learned, key_of
from workers.footprint.prediction import build_of, predicted
from workers.models.catalog import convert
from workers.models.spec import ModelSpec
from workers.protocol.exits import Exit
from workers.settings import SupervisorSettings


def run(state: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PADDOCK_")}
    command = [sys.executable, "-m", "gateway.cli", "models", *flags, "--state-dir", str(state)]
    return subprocess.run(command, env=clean, cwd=ROOT, capture_output=True, text=True)


def catalog(folder: Path, *models: dict[str, object]) -> Path:
    entries = [{"path": str(DEMO_MODEL), **model} for model in models]
    (file := folder / "catalog.json").write_text(json.dumps({"models": entries}))
    return file


def models(*entries: dict[str, object]) -> tuple[ModelSpec, ...]:
    return convert({"models": [{"path": str(DEMO_MODEL), **entry} for entry in entries]}, "test").models


def settings(folder: Path) -> SupervisorSettings:
    return SupervisorSettings(state_dir=folder)


def test_a_catalog_that_fits(tmp_path: Path) -> None:
    file = catalog(tmp_path, {"name": "one", "workers": 2}, {"name": "two", "slots": 4}, {"name": "none", "workers": 0})
    done = run(tmp_path, "plan", "--catalog", str(file), "--json")
    assert (done.returncode, done.stderr) == (Exit.OK, "")
    plan = json.loads(done.stdout)
    assert [(worker["model"], worker["worker"]) for worker in plan["workers"]] == [("one", 0), ("one", 1), ("two", 0)]
    first, second, _ = [worker["shares"][0] for worker in plan["workers"]]
    assert first["device"] == "cpu"
    assert first["total"] == sum(first[part] for part in ("weights", "cells", "compute", "other"))
    assert (first["weights"] > 4 << 20, second["weights"]) == (True, 0), "they map the same file"
    assert plan["fits"]
    assert plan["devices"][-1]["planned"] == sum(worker["shares"][0]["total"] for worker in plan["workers"])


def test_a_table_for_people(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "--catalog", str(catalog(tmp_path, {"name": "one"})))
    assert done.returncode == Exit.OK
    head, row, *_ = done.stdout.splitlines()
    assert head.split() == ["model", "worker", "device", "weights", "cells", "compute", "other", "total", "fits"]
    assert row.split()[:3] == ["one", "0", "cpu"]
    assert done.stdout.endswith("All workers fit.\n")


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    file = catalog(tmp_path, {"name": "big", "kv_tokens": 2**27})
    done = run(tmp_path, "plan", "--catalog", str(file))
    assert done.returncode == Exit.NO_MEMORY
    assert "big" in done.stdout
    assert "lower --kv-tokens" in done.stdout
    assert "Not all workers fit" in done.stdout


@pytest.mark.parametrize("flags", [["rm"], ["plan", "--no-such"], ["plan", "--catalog", "none.yaml"], []])
def test_wrong_arguments_are_told(tmp_path: Path, flags: list[str]) -> None:
    done = run(tmp_path, *flags)
    assert done.returncode == Exit.USAGE
    assert done.stderr.startswith("paddock: ")


def test_it_tells_what_it_does(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "--help")
    assert (done.returncode, "paddock models plan" in done.stdout) == (Exit.OK, True)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "--catalog", str(catalog(tmp_path, {"name": "one", "path": "none.gguf"})))
    assert done.returncode == Exit.BAD_MODEL
    assert "none.gguf" in done.stderr


def test_workers_of_a_host_with_eight_gpus_go_where_most_is_free(tmp_path: Path) -> None:
    plan = planned(
        settings(tmp_path), models({"name": "one", "workers": 8}, {"name": "two", "gpus": 2}), gpu_host().devices()
    )
    used = [tuple(share.device for share in worker.shares) for worker in plan.workers]
    assert sorted(one[0] for one in used[:8]) == [f"GPU-{number}" for number in range(8)]
    assert len(used[8]) == 3
    assert used[8][-1] == "cpu"
    assert plan.fits


def test_a_full_gpu_is_told(tmp_path: Path) -> None:
    plan = planned(settings(tmp_path), models({"name": "one"}), gpu_host(1, free_gib=0.1).devices())
    assert not plan.fits
    assert "GPU-0" in plan.workers[0].why
    assert "102 MiB are left" in plan.workers[0].why
    assert " no" in as_text(plan)


def test_a_model_for_the_processor_leaves_gpus_alone(tmp_path: Path) -> None:
    plan = planned(settings(tmp_path), models({"name": "one", "llama": {"n_gpu_layers": 0}}), gpu_host(1).devices())
    assert [share.device for share in plan.workers[0].shares] == ["cpu"]


def test_what_was_learned_corrects_the_plan(tmp_path: Path) -> None:
    (model,) = models({"name": "one"})
    host = gpu_host(0)
    before = planned(settings(tmp_path), [model], host.devices()).workers[0].shares[0].total
    told = predicted(model, free_bytes=None)
    more = told.host.total + (50 << 20)
    Learned(tmp_path / FILE).record(key_of(model, build_of()), told, host=more)
    after = planned(settings(tmp_path), [model], host.devices()).workers[0].shares[0].total
    assert after - before == pytest.approx(50 << 20, abs=2 << 20)
