"""Decodes as recorded launches: one for each padded batch size, all in one pool of memory, up to the logits.

A recorded pass reads and writes the same places each time: `DecodeGraphs` owns those places and knows the sizes.
Recording itself is `CudaRecorder`'s alone. What is eager, and when a recording may be used, decides `device_runner`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pagemill_engine.runner.device_forward import DeviceForward
from pagemill_kernels.request_rows.layout import StepInputs

MOST_REQUESTS = 512
"""Larger decodes keep the device busy for so long that launching them one by one costs nothing."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that are recorded, rising: others are padded to the next one, by an eighth of it at most or 8."""
    largest = min(max_num_seqs, MOST_REQUESTS)
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, MOST_REQUESTS + 1, 32)]
    return [*(size for size in sizes if size < largest), largest]


class Recorder(Protocol):
    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it, and return what runs it again on the same places. It must not wait for the device."""


class CudaRecorder:
    """CUDA graphs that share one pool, since no two of them run at a time. The pool's memory goes with the last of
    them."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        # What is compiled, tuned or allocated once must be so before: it cannot be recorded.
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


class DecodeGraphs:
    def __init__(
        self, forward: DeviceForward, sizes: list[int], table_width: int, vocab_size: int, device: torch.device
    ) -> None:
        """Holds nothing but buffers until `record`."""
        self._forward = forward
        self._sizes = sizes
        inputs = StepInputs.empty(sizes[-1], sizes[-1], sizes[-1], table_width, device)
        logits = torch.empty(sizes[-1], vocab_size, dtype=torch.float32, device=device)
        self._places = {size: (inputs.first(size), logits[:size]) for size in sizes}
        self._replays: dict[int, Callable[[], None]] = {}

    def record(self, recorder: Recorder, prepare: Callable[[StepInputs], None]) -> None:
        """Capture all sizes, the largest first: the others fit into its memory. `prepare` fills the inputs with padding
        requests."""
        for size in reversed(self._sizes):
            inputs, logits = self._places[size]
            prepare(inputs)
            self._replays[size] = recorder.record(partial(self._forward.decode_into, logits, inputs))

    def forget(self) -> None:
        """What they read lies elsewhere from now on."""
        self._replays.clear()

    def size_for(self, num_requests: int) -> int | None:
        """The padded size; `None`: nothing so large is recorded."""
        if num_requests > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, num_requests)]
        return size if size in self._replays else None

    def inputs(self, size: int) -> StepInputs:
        """To be filled before `run`."""
        return self._places[size][0]

    def run(self, size: int) -> Tensor:
        """The logits of all `size` requests, float32 [size, vocab]: until the next run."""
        self._replays[size]()
        return self._places[size][1]
