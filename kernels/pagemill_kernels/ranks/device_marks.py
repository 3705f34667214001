"""How far a device has come in what is queued for it, and how long it computed, as its host reads without waiting.

Marks are queued with steps and exchanges, and recorded in CUDA graphs with them. On the CPU, which runs what is queued
at once, the host makes them. Who compares the ranks is the engine's part (`executing.device.device_ranks`).
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from pagemill_kernels.ranks.triton_body import EXCHANGE, EXCHANGE_BITS, LEAVE, STEP, STEP_END, mark

_BITS: int = EXCHANGE_BITS.value
END = (1 << _BITS) - 1
"""The number that stands for the end of a step, behind all of its exchanges."""


class Reached(NamedTuple):
    step: int
    exchange: int
    """The number of the exchange that the device has come to; `END`."""
    computed_s: float
    """In all steps that have ended, without exchanges."""
    num_steps: int


class DeviceMarks:
    def __init__(self, device: torch.device) -> None:
        """Of the current device's current stream."""
        self._on_host = device.type == "cpu"
        self._state = torch.zeros(4, dtype=torch.int64, device=device)
        """The place; nanoseconds of steps without exchanges, of which those that run are missing; steps; the time that
        the step has computed before it came to an exchange."""
        self._seen = self._state if self._on_host else torch.zeros(4, dtype=torch.int64, pin_memory=True)

    def begin(self, step: int) -> None:
        self._mark(STEP.value, step)

    def exchange(self) -> None:
        self._mark(EXCHANGE.value)

    def leave(self) -> None:
        """Mark that the exchange is over."""
        self._mark(LEAVE.value)

    def end(self) -> None:
        """Mark the end of a step."""
        self._mark(STEP_END.value)

    def read(self) -> Reached:
        place, computed_ns, num_steps, _ = self._seen.tolist()
        return Reached(place >> _BITS, place & END, computed_ns / 1e9, num_steps)

    def _mark(self, kind: int, step: int = 0) -> None:
        if not self._on_host:
            mark[(1,)](self._state, self._seen, step, KIND=kind, num_warps=1)
            return
        place, computed_ns, num_steps, running_ns = self._state.tolist()
        now_ns = time.monotonic_ns()
        if kind == STEP.value:
            place, running_ns = step << _BITS, -now_ns
        elif kind == EXCHANGE.value:
            place, running_ns = place + 1, running_ns + now_ns
        elif kind == LEAVE.value:
            running_ns -= now_ns
        else:
            place |= END
            computed_ns, num_steps = computed_ns + running_ns + now_ns, num_steps + 1
        self._state.copy_(torch.tensor([place, computed_ns, num_steps, running_ns]))
