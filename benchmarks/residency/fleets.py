"""Fleets and calls that residency is measured with."""

from __future__ import annotations

import random
from dataclasses import replace

from benchmarks.residency.simulator import GIB, Call, gpu_machine, gpu_need
from workers.residency.picture import CPU, Demand, Machine, Model, Picture, Share, Worker
from workers.residency.policy import Residency, resolve

SIZES_GIB = (6, 9, 14, 20, 40, 70)
NOW = 1_000.0


def alternating(num_calls: int, gap_s: float, service_s: float, num_models: int = 6, seed: int = 0) -> list[Call]:
    """Return calls that come one after the other, each for the next model or, with a `seed`, for any."""
    chance = random.Random(seed)
    numbers = [chance.randrange(num_models) if seed else number % num_models for number in range(num_calls)]
    return [Call(number * gap_s, f"m{model}", service_s) for number, model in enumerate(numbers)]


def full_fleet(
    num_machines: int, num_gpus: int, num_models: int, num_waiting: int, *, part_busy: float, seed: int = 1
) -> Picture:
    """Return a fleet whose GPUs of 80 GiB are full of workers of the first half of the models, while calls wait for
    some of the others. `part_busy`: the part of the workers that have calls."""
    chance = random.Random(seed)
    policy = resolve(Residency(max=256), 1)
    models = [
        Model(f"m{number:03}", policy, gpu_need(SIZES_GIB[number % len(SIZES_GIB)])) for number in range(num_models)
    ]
    workers: list[Worker] = []
    machines: list[Machine] = []
    for number in range(num_machines):
        machine = gpu_machine(f"host{number:02}", [80.0] * num_gpus, 2048)
        free = {device.id: device.total_bytes for device in machine.devices}
        for device in machine.gpus:
            while fitting := [model for model in models[: num_models // 2] if model.need.gpu_bytes <= free[device.id]]:
                model = chance.choice(fitting)
                shares = (Share(device.id, model.need.gpu_bytes), Share(CPU, model.need.host_bytes))
                for share in shares:
                    free[share.device] -= share.bytes
                workers.append(_worker(len(workers), model.name, machine.id, shares, chance, part_busy))
        devices = tuple(replace(device, free_bytes=free[device.id]) for device in machine.devices)
        machines.append(replace(machine, devices=devices))
    wanted = chance.sample(models[num_models // 2 :], min(num_waiting, num_models - num_models // 2))
    demand = tuple(Demand(model.name, chance.randrange(1, 9), chance.uniform(NOW - 60, NOW)) for model in wanted)
    return Picture(tuple(machines), tuple(models), tuple(workers), demand)


def _worker(
    number: int, model: str, machine: str, shares: tuple[Share, ...], chance: random.Random, part_busy: float
) -> Worker:
    num_running = chance.randrange(1, 5) if chance.random() < part_busy else 0
    since, last_used = chance.uniform(0, NOW - 100), chance.uniform(NOW - 100, NOW)
    return Worker(
        f"w{number:05}", model, machine, shares, "ready", since, last_used, num_running=num_running, num_taken=9
    )


def sizes_gib(picture: Picture) -> float:
    """Return the GiB that all workers of a picture take."""
    return sum(share.bytes for worker in picture.workers for share in worker.shares) / GIB
