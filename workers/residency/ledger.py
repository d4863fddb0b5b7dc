"""Keeps account of memory while a plan is made: what is free now, and what will be when those that leave are gone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workers.residency.picture import Device, Machine, Share, Worker


def free_bytes(device: Device, shares: Iterable[tuple[Worker, Share]]) -> int:
    """Return the bytes of a device that a new worker may take; below 0 if workers take more than was foreseen.

    It is the smaller of two counts. What the device reports lacks what loading workers have not touched yet, and holds
    pages of mapped files that could be dropped but are needed. What is left of the total lacks what nobody foresaw."""
    taken = unseen = 0
    for worker, share in shares:
        taken += share.bytes
        if worker.status == "loading":
            unseen += max(0, share.bytes - share.seen_bytes)
    left = device.total_bytes - device.other_bytes - taken
    return min(left, device.free_bytes - unseen) if device.is_trusted else left


class Ledger:
    """Bytes of each machine's devices. Changed while a plan is made; each plan has its own."""

    def __init__(self, machines: Sequence[Machine], workers: Sequence[Worker]) -> None:
        self.now: dict[str, dict[str, int]] = {}
        """Machine -> device -> bytes that are free now."""
        self.coming: dict[str, dict[str, int]] = {}
        """The same once all that leave are gone, less what is promised to models that wait for it."""
        self.has_coming: set[str] = set()
        """Machines that somebody leaves."""
        self.empty: dict[str, dict[str, int]] = {}
        """The same without any of this fleet's workers, if others took what is known of them."""
        self.reported: dict[str, dict[str, int]] = {}
        """The same, as devices report it."""
        self.num_changes = dict.fromkeys((machine.id for machine in machines), 0)
        """Machine -> how often its memory was counted anew."""
        self._startable: dict[str, dict[str, int]] = {}
        self._gpu_sizes: dict[str, list[int]] = {}
        taken: dict[tuple[str, str], list[tuple[Worker, Share]]] = {}
        for worker in workers:
            for share in worker.shares:
                taken.setdefault((worker.machine, share.device), []).append((worker, share))
        for machine in machines:
            self.now[machine.id] = {
                device.id: free_bytes(device, taken.get((machine.id, device.id), ())) for device in machine.devices
            }
            self.reported[machine.id] = {
                device: size + sum(share.bytes for _, share in taken.get((machine.id, device), ()))
                for device, size in self.now[machine.id].items()
            }
            self.coming[machine.id] = dict(self.now[machine.id])
            self.empty[machine.id] = {device.id: device.total_bytes - device.other_bytes for device in machine.devices}

    def leave(self, worker: Worker) -> None:
        """Count a worker's bytes as coming."""
        self.has_coming.add(worker.machine)
        _add(self.coming[worker.machine], worker.shares, 1)
        self._changed(worker.machine)

    def promise(self, machine: str, shares: Iterable[Share]) -> None:
        """Set bytes that are coming aside for a model."""
        _add(self.coming[machine], shares, -1)
        self._changed(machine)

    def take(self, machine: str, shares: Sequence[Share]) -> None:
        """Count bytes as taken from now on."""
        _add(self.now[machine], shares, -1)
        self.promise(machine, shares)

    def startable(self, machine: str) -> dict[str, int]:
        """Return the bytes of each device that are free now and promised to nobody."""
        found = self._startable.get(machine)
        if found is None:
            coming = self.coming[machine]
            found = {device: min(size, coming[device]) for device, size in self.now[machine].items()}
            self._startable[machine] = found
        return found

    def gpu_sizes(self, machine: Machine) -> list[int]:
        """Return the bytes of a machine's GPUs that are free now and promised to nobody, in ascending order."""
        found = self._gpu_sizes.get(machine.id)
        if found is None:
            room = self.startable(machine.id)
            found = self._gpu_sizes[machine.id] = sorted(room[device.id] for device in machine.gpus)
        return found

    def _changed(self, machine: str) -> None:
        self.num_changes[machine] += 1
        self._startable.pop(machine, None)
        self._gpu_sizes.pop(machine, None)


def _add(room: dict[str, int], shares: Iterable[Share], sign: int) -> None:
    for share in shares:
        if share.device in room:
            room[share.device] += sign * share.bytes
