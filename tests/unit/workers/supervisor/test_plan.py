"""Who runs what on which device, and when the dead are started again: pure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.process_limits import full_disk
from workers.models.catalog import CatalogError
from workers.models.spec import LlamaSettings, ModelSpec
from workers.settings import SupervisorSettings
from workers.supervisor import plan as planning
from workers.supervisor.child import Backoff
from workers.supervisor.plan import available_cores, host_id, plan
from workers.supervisor.supervisor import recipe, write_specs


def models(threads: int = 0) -> tuple[ModelSpec, ...]:
    return (
        ModelSpec(name="big", path="/m/big.gguf", workers=2, llama=LlamaSettings(n_threads=threads)),
        ModelSpec(name="small", path="/m/small.gguf", workers=1),
        ModelSpec(name="later", path="/m/later.gguf", workers=0),
    )


def test_cores_are_divided_and_devices_go_round() -> None:
    planned = plan(models(), cores=8, devices=("3", "5"), host="h")
    assert [
        (worker.name, worker.worker_id, worker.model.name, worker.device, worker.model.llama.n_threads)
        for worker in planned
    ] == [
        ("worker-0", "h-0", "big", "3", 2),
        ("worker-1", "h-1", "big", "5", 2),
        ("worker-2", "h-2", "small", "3", 2),
    ]


def test_a_models_cores_are_divided_among_its_workers() -> None:
    bound = (
        ModelSpec(name="big", path="big.gguf", workers=2, llama=LlamaSettings(cpus="0-3,8-11")),
        ModelSpec(name="free", path="free.gguf", workers=1),
        ModelSpec(name="calm", path="calm.gguf", workers=1, llama=LlamaSettings(cpus="4-7", n_threads=2)),
    )
    planned = plan(bound, cores=12, devices=(), host="h")
    assert [(worker.model.llama.cpus, worker.model.llama.n_threads) for worker in planned] == [
        ("0-3", 4),
        ("8-11", 4),
        ("", 3),
        ("4-7", 2),
    ]


def test_a_worker_may_get_several_devices() -> None:
    wide = (
        ModelSpec(name="big", path="big.gguf", workers=2, gpus=2),
        ModelSpec(name="small", path="small.gguf", workers=2),
    )
    planned = plan(wide, cores=8, devices=("0", "1", "2"), host="h")
    assert [worker.device for worker in planned] == ["0,1", "2,0", "1", "2"]
    assert {worker.device for worker in plan(wide, cores=8, devices=(), host="h")} == {None}
    with pytest.raises(CatalogError, match="each worker of big wants 2 GPUs and this machine has 1; lower `gpus`"):
        plan(wide, cores=8, devices=("0",), host="h")


def test_a_worker_is_told_how_to_end_and_where_to_leave_word() -> None:
    settings = SupervisorSettings(step_timeout_s=7, core_dumps=True, state_dir=Path("/s"))
    environment = recipe(plan(models(), 4, (), "h")[1], settings, {}).environment
    told = ("PADDOCK_STEP_TIMEOUT_S", "PADDOCK_CORE_DUMPS", "PADDOCK_BLACK_BOX")
    assert [environment[name] for name in told] == ["7.0", "True", "/s/run/worker-1.calls"]


def test_every_worker_has_a_thread_and_the_catalog_has_the_last_word() -> None:
    planned = plan(models(threads=6), cores=1, devices=(), host="h")
    assert [(worker.model.llama.n_threads, worker.device) for worker in planned] == [(6, None), (6, None), (1, None)]


def test_a_container_counts_its_share_of_the_cores(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    cores = available_cores(quota)
    for text, share in (("max 100000", cores), ("100000 100000", 1), ("50000 100000", 1), ("6400000 100000", cores)):
        quota.write_text(text)
        assert available_cores(quota) == share


def test_a_worker_is_told_all_but_its_model_by_its_environment_and_no_keys_of_callers(tmp_path: Path) -> None:
    settings = SupervisorSettings(redis_url="unix:///r.sock", worker_secret="hush", state_dir=tmp_path)
    inherited = {"PATH": "/bin", "PADDOCK_API_KEY": "pk-x", "PADDOCK_SLOTS": "99", "PADDOCK_GATEWAY_GRACE_S": "1"}
    worker = plan(models(), 4, ("1",), "h")[0]
    made = recipe(worker, settings, inherited)
    assert made.argv[1:] == ("-m", "workers.cli", "worker")
    assert made.environment.keys() & {"PADDOCK_API_KEY", "PADDOCK_CATALOG", "PADDOCK_SLOTS"} == set()
    expected = {
        "PATH": "/bin",
        "PADDOCK_MODEL_SPEC": str(tmp_path / "run" / "worker-0.json"),
        "PADDOCK_WORKER_ID": "h-0",
        "PADDOCK_WORKER_SECRET": "hush",
        "PADDOCK_REDIS_URL": "unix:///r.sock",
        "PADDOCK_GATEWAY_GRACE_S": "1",
        "PADDOCK_WORKERS_ON_MACHINE": "3",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    assert expected.items() <= made.environment.items()
    apart = settings.model_copy(update={"worker_redis_url": "unix:///w.sock"})
    made = recipe(worker, apart, {"PADDOCK_WORKER_REDIS_URL": "unix:///w.sock", "PADDOCK_REDIS_URL": "unix:///r.sock"})
    assert made.environment["PADDOCK_REDIS_URL"] == "unix:///w.sock"
    assert "unix:///r.sock" not in made.environment.values(), "a worker has no rights of its supervisor"
    (tmp_path / "run").mkdir()
    write_specs([worker], settings)
    told = tmp_path / "run" / "worker-0.json"
    assert told.stat().st_mode & 0o777 == 0o600
    assert json.loads(told.read_bytes()) == {
        "name": "big",
        "path": "/m/big.gguf",
        "workers": 2,
        "llama": {"n_threads": 1},
    }


def test_a_full_disk_leaves_the_file_of_a_worker_as_it_is(tmp_path: Path) -> None:
    settings = SupervisorSettings(redis_url="unix:///r.sock", worker_secret="hush", state_dir=tmp_path)
    one, other = plan(models(), 4, ("1",), "h")[:2]
    told = tmp_path / "run" / "worker-0.json"
    write_specs([one], settings)
    right = told.read_bytes()
    with full_disk():
        write_specs([one], settings)
        with pytest.raises(OSError, match="File too large"):
            write_specs([one, other], settings)
    assert told.read_bytes() == right
    assert [path.name for path in told.parent.iterdir()] == ["worker-0.json"]


def test_host_ids_are_stable_and_differ_by_state_folder() -> None:
    assert host_id(Path("/a")) == host_id(Path("/a"))
    assert host_id(Path("/a")) != host_id(Path("/b"))


def test_backoff_doubles_to_its_bound_and_forgives_after_a_stable_minute() -> None:
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(8)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert backoff.after(60.0) == 0.2
    assert backoff.after(1.0) == 0.4


def test_an_existing_choice_of_devices_is_respected() -> None:
    assert planning.visible({"CUDA_VISIBLE_DEVICES": "2, GPU-abc"}) == ("2", "GPU-abc")
    assert planning.visible({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert planning.visible({"CUDA_VISIBLE_DEVICES": "1,-1,0"}) == ("1",)


def test_devices_come_from_the_drivers_program(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    program.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    assert planning.visible({"PATH": path}) == ("0", "1")
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert planning.visible({"PATH": path}) == ()
    assert planning.visible({"PATH": "/nowhere"}) == ()


def test_a_worker_with_a_device_counts_as_the_drivers_program_does() -> None:
    assert planning.environment_of("1") == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert planning.environment_of(None) == {}
