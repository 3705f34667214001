"""The rows of a step for recurrent layers on a device, where a recorded step finds them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagemill_kernels.gpu.launch import upload
from pagemill_kernels.recurrent.batch import StateBatch


class StepStates(NamedTuple):
    """What the requests of a step read and write of recurrent layers, int32: a `StateBatch` on the device."""

    requests: Tensor
    """[4, requests]: rows (-1: padding), slots of states, logged and computed tokens."""
    write_starts: Tensor
    """[requests + 1]: first of the writes of each."""
    writes: Tensor
    """[most writes, 2]: blocks behind a request's state, and slot."""
    values: Tensor
    """All of them."""

    @classmethod
    def of(cls, values: Tensor, num_requests: int) -> StepStates:
        starts = 4 * num_requests
        first = starts + num_requests + 1
        return cls(values[:starts].view(4, -1), values[starts:first], values[first:].view(-1, 2), values)

    @classmethod
    def empty(cls, num_requests: int, num_writes: int, device: torch.device) -> StepStates:
        size = 5 * num_requests + 1 + 2 * num_writes
        return cls.of(torch.empty(size, dtype=torch.int32, device=device), num_requests)

    def first(self, num_requests: int) -> StepStates:
        """Return room for fewer requests, in the same memory."""
        return StepStates.of(self.values[: 5 * num_requests + 1 + 2 * len(self.writes)], num_requests)

    def fill(self, batch: StateBatch, zero_slot: int = 0) -> None:
        """Copy the rows of a step here without waiting. Further requests are of padding and begin at `zero_slot`."""
        num_requests, num_writes, room = len(batch.rows), len(batch.writes), self.requests.shape[1]
        if num_requests > room or num_writes > len(self.writes):
            raise ValueError(
                f"recurrent layers: {num_requests} requests that write {num_writes} states do not fit into inputs of "
                f"{room} and {len(self.writes)}"
            )
        requests = np.zeros((4, room), dtype=np.int32)
        requests[0], requests[1] = -1, zero_slot
        assert batch.num_computed is not None
        given = (batch.rows, batch.sources, batch.num_logged, batch.num_computed)
        requests[:, :num_requests] = np.stack(given)
        starts = np.full(room + 1, num_writes, dtype=np.int32)
        starts[: num_requests + 1] = batch.write_starts
        values = np.concatenate((requests.ravel(), starts, batch.writes[:, 1:].ravel().astype(np.int32)))
        self.values[: len(values)].copy_(upload(values, self.values.device), non_blocking=True)
