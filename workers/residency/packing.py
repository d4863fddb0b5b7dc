"""Finds the devices of a machine that a worker gets: best fit, several workers on a GPU, split where one is too small.

`room` is always the bytes of each device of one machine by the device's id.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set

from workers.residency.picture import CPU, Machine, Need, Share

Room = Mapping[str, int]


def pack(need: Need, machine: Machine, room: Room, avoided: Set[str] = frozenset()) -> tuple[Share, ...] | None:
    """Return what a worker would take of each device; None if it does not fit.

    `avoided`: GPUs that already have a worker of the model, and compute no faster with two; taken if there is no other.
    """
    host = room.get(CPU, 0)
    gpus = machine.gpus
    if not (need.gpu_bytes and gpus):
        fits = need.cpu_bytes and need.cpu_bytes <= host
        return (Share(CPU, need.cpu_bytes),) if fits else None
    if need.host_bytes > host:
        return None
    free = [(device.id, room[device.id]) for device in gpus]
    found = _on_gpus(need, [pair for pair in free if pair[0] not in avoided]) if avoided else None
    found = found or _on_gpus(need, free)
    if found and need.host_bytes:
        return (*found, Share(CPU, need.host_bytes))
    return found


def _on_gpus(need: Need, free: Sequence[tuple[str, int]]) -> tuple[Share, ...] | None:
    """Return a worker's shares of the GPUs whose `free` bytes are given, or None."""
    ranked = sorted(free, key=lambda pair: pair[1])
    if need.num_gpus > 1:
        return _on_so_many(need, ranked, need.num_gpus)
    whole = need.gpu_bytes + need.bytes_per_gpu
    single = next((device for device, size in ranked if size >= whole), None)
    if single is not None:
        return (Share(single, whole),)
    if not need.can_split:
        return None
    # The fewest GPUs, those with the most memory: each more costs copies between them.
    for number in range(2, len(ranked) + 1):
        if found := _on_so_many(need, ranked[-number:], number):
            return found
    return None


def estimate(need: Need, room: Room, sizes: Sequence[int]) -> tuple[int, int] | None:
    """Return how many devices `pack` would use at least, and the bytes left over there; None: it does not fit.

    It takes a tenth of `pack`'s time. `sizes`: the free bytes of the machine's GPUs in ascending order."""
    if not (need.gpu_bytes and sizes):
        left = room.get(CPU, 0) - need.cpu_bytes
        return (1, left) if need.cpu_bytes and left >= 0 else None
    if need.host_bytes > room.get(CPU, 0):
        return None
    whole = need.gpu_bytes + need.bytes_per_gpu
    if need.num_gpus == 1 and sizes[-1] >= whole:
        return 1, sizes[bisect_left(sizes, whole)] - whole
    if need.num_gpus == 1 and not need.can_split:
        return None
    free = 0
    for number, size in enumerate(reversed(sizes), start=1):
        free += size - need.bytes_per_gpu
        if size < need.bytes_per_gpu or (number == need.num_gpus > 1 and free < need.gpu_bytes):
            return None
        if free >= need.gpu_bytes and number >= need.num_gpus:
            return number, free - need.gpu_bytes
    return None


def _on_so_many(need: Need, ranked: Sequence[tuple[str, int]], number: int) -> tuple[Share, ...] | None:
    """Return a worker's shares of the `number` GPUs that leave the least unused, or None. `ranked`: from the fullest
    on."""
    for first in range(len(ranked) - number + 1):
        chosen = ranked[first : first + number]
        if need.split:
            # The largest proportion goes to the GPU with the most memory; the shares stand in the split's order.
            proportions = [*need.split, *[0.0] * (number - len(need.split))]
            order = sorted(range(number), key=proportions.__getitem__)
            chosen = [pair for _, pair in sorted(zip(order, chosen, strict=True))]
        else:
            proportions = [size - need.bytes_per_gpu for _, size in chosen]
        sizes = [size + need.bytes_per_gpu for size in _divided(need.gpu_bytes, proportions)]
        if sizes and all(size <= free for size, (_, free) in zip(sizes, chosen, strict=True)):
            return tuple(Share(device, size) for size, (device, _) in zip(sizes, chosen, strict=True))
    return None


def _divided(total: int, proportions: Sequence[float]) -> list[int]:
    """Return `total` bytes divided in these proportions; empty if they can't be."""
    whole = sum(proportions)
    if min(proportions) < 0 or whole <= 0:
        return []
    exact = [total * each / whole for each in proportions]
    sizes = [math.floor(size) for size in exact]
    # What rounding leaves over is a byte each for those that lost most by it: nobody gets more than its proportion, up.
    lost = sorted(range(len(sizes)), key=lambda place: sizes[place] - exact[place])
    for place in lost[: total - sum(sizes)]:
        sizes[place] += 1
    return sizes


def largest_room(need: Need, machine: Machine, room: Room) -> int:
    """Return the most bytes that a worker of this kind could have on a machine with this room, to say how far it is
    from what it needs."""
    gpus = machine.gpus
    if not (need.gpu_bytes and gpus):
        return room.get(CPU, 0)
    sizes = sorted((room[device.id] for device in gpus), reverse=True)
    return sum(sizes[: len(sizes) if need.can_split and need.num_gpus == 1 else need.num_gpus])
