"""Asks the fleet for a completion's slot number, and for the adapters behind the names that it asked for."""

from __future__ import annotations

from gateway.call import Call
from gateway.inquiries import Inquiries
from gateway.pipeline import Pipeline
from gateway.routing.slot_numbers import number_of
from workers.protocol.requests import AdapterUse


class FleetPlace:
    def __init__(self, inquiries: Inquiries, pipeline: Pipeline) -> None:
        self._inquiries = inquiries
        self._pipeline = pipeline

    def number_slot(self, model: str, worker: str, slot: int) -> int:
        """Return the slot's number; -1 where the worker is not there any more."""
        return number_of(worker, slot, self._inquiries.workers(model))

    def adapters(self, call: Call, asked: tuple[AdapterUse, ...]) -> tuple[AdapterUse, ...]:
        """Return the adapters that the call computes with. Raises InvalidRequest, PermissionDenied."""
        return self._pipeline.adapters(call, asked)
