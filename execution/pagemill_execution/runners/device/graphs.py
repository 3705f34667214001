"""CUDA graphs of steps, captured in one memory pool.

Decodes are captured by padded numbers of requests, steps with prompts by padded numbers of tokens and of requests. A
captured pass always reads and writes the same buffers: `StepGraphs` owns the buffers and knows the shapes. A decode is
captured up to the logits; in other steps few tokens sample, and their logits are launched behind the graph.
`CudaGraphCapturer` alone captures. `device_runner` decides when a graph is used.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pagemill_execution.runners.device.device_adapters import DeviceTables
from pagemill_execution.runners.device.device_forward import DeviceForward
from pagemill_execution.runners.device.device_rows import DeviceStep
from pagemill_kernels.request_rows.layout import DeviceStepInputs, RowLayout

MOST_REQUESTS = 512
"""Most requests of a captured decode. Larger ones compute for so long that their launches cost nothing."""
MOST_TOKENS = 8192
"""Most tokens of a captured step with prompts, for the same reason, even of the smallest models."""
_SMALL = (16, 32, 64, 96, 128, *range(192, 513, 64), *range(640, 1025, 128))
_OCTAVE = (36, 40, 45, 50, 57, 64)
"""Sizes in 32nds of a power of two: no step above 1,024 tokens is padded by more than a seventh."""
_TOKENS = (*_SMALL, *(part * power // 32 for power in (1024, 2048, 4096) for part in _OCTAVE))
_REQUESTS = (64,)
"""Recorded numbers of requests, besides the largest: attention launches programs for every possible request."""


class GraphShape(NamedTuple):
    """The padded size of a captured step."""

    num_tokens: int
    num_requests: int
    is_decode: bool


def decode_shapes(max_num_seqs: int) -> list[GraphShape]:
    """Return the shapes of decodes, rising.

    Other decodes are padded to the next one, by at most 8 or an eighth of it.
    """
    largest = min(max_num_seqs, MOST_REQUESTS)
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, MOST_REQUESTS + 1, 32)]
    return [GraphShape(size, size, is_decode=True) for size in _up_to(largest, sizes)]


def mixed_shapes(max_num_seqs: int, max_num_batched_tokens: int, most_tokens: int = MOST_TOKENS) -> list[GraphShape]:
    """Return the shapes of steps with prompts, rising, whether or not requests decode in them.

    There is always a free row for a padding request, which gets the padding tokens. No shape above 1,024 tokens is
    larger than `most_tokens`.
    """
    found = []
    largest = max(size for size in _TOKENS if size <= max(most_tokens, _SMALL[-1]))
    for num_tokens in _up_to(min(max_num_batched_tokens, largest), _TOKENS):
        most = min(num_tokens, max_num_seqs + 1)
        found += [GraphShape(num_tokens, size, is_decode=False) for size in _up_to(most, _REQUESTS)]
    return found


def shapes_to_capture(
    max_num_seqs: int, max_num_batched_tokens: int, most_tokens: int = MOST_TOKENS
) -> list[GraphShape]:
    """Return all shapes to capture. `most_tokens`: the largest step with prompts."""
    decodes = decode_shapes(min(max_num_seqs, max_num_batched_tokens))
    return [*decodes, *mixed_shapes(max_num_seqs, max_num_batched_tokens, most_tokens)]


class GraphCapturer(Protocol):
    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture `run` and return a function that replays it on the same buffers.

        `run` must not wait for the device, and everything in it must be compiled and tuned.
        """


class CudaGraphCapturer:
    """Captures CUDA graphs that share one memory pool, since no two of them run at a time.

    The pool's memory is freed with the last graph.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


@dataclass(slots=True, frozen=True)
class CapturedGraph:
    """The captured graph of one shape."""

    shape: GraphShape
    inputs: DeviceStepInputs
    """Inputs; fill them before `run`."""
    out: Tensor
    replay: Callable[[], None]
    slots: Tensor | None = None
    """The adapters' slots of its tokens; fill them before `run`. None: no token has one."""

    def run(self) -> Tensor:
        """Replay the graph.

        Returns a decode's logits, float32 [requests, vocab], or other steps' normalised hidden states [tokens, hidden],
        valid until any graph's next run.
        """
        self.replay()
        return self.out


class StepGraphs:
    def __init__(
        self,
        forward: DeviceForward,
        shapes: Iterable[GraphShape],
        layout: RowLayout,
        max_model_len: int,
        adapters: DeviceTables | None = None,
    ) -> None:
        """Allocate buffers only; `capture` captures the graphs, with `adapters` and without."""
        self._forward, self._max_model_len = forward, max_model_len
        self._adapters = adapters if adapters is not None and adapters.is_capturable else None
        shapes = sorted(shapes)
        # No padding request has more tokens than a row.
        possible = [each for each in shapes if each.num_tokens <= each.num_requests * max_model_len]
        self._decodes, self._mixed = ([each for each in possible if each.is_decode == kind] for kind in (True, False))
        most_tokens, most_requests = max(each.num_tokens for each in shapes), max(each.num_requests for each in shapes)
        self._inputs = forward.empty_inputs(most_tokens, most_requests, layout)
        self._logits = forward.empty_logits(_most_tokens(shapes, decodes=True))
        self._hidden = forward.empty_hidden(_most_tokens(shapes, decodes=False))
        self._slots = None if self._adapters is None else self._adapters.empty_slots(most_tokens)
        self._captured: dict[tuple[GraphShape, bool], CapturedGraph] = {}

    def capture(self, capturer: GraphCapturer, prepare: Callable[[GraphShape, DeviceStepInputs], None]) -> None:
        """Capture all shapes, the largest first, whose memory the others reuse.

        `prepare` fills the inputs with padding requests.
        """
        for shape in sorted([*self._decodes, *self._mixed], reverse=True):
            inputs = self._inputs.first(shape.num_tokens, shape.num_requests)
            out = (self._logits if shape.is_decode else self._hidden)[: shape.num_tokens]
            run = self._forward.decode_into if shape.is_decode else self._forward.hidden_into
            prepare(shape, inputs)
            self._capture(capturer, shape, inputs, out, partial(run, out, inputs))
            if self._adapters is not None and self._slots is not None:
                slots = self._slots[: shape.num_tokens]
                of_tokens = self._adapters.on_device(slots)
                self._capture(capturer, shape, inputs, out, partial(run, out, inputs, of_tokens), slots)

    def _capture(
        self,
        capturer: GraphCapturer,
        shape: GraphShape,
        inputs: DeviceStepInputs,
        out: Tensor,
        run: Callable[[], None],
        slots: Tensor | None = None,
    ) -> None:
        # One-time compilation, loading and tuning cannot be captured.
        with self._forward.abbreviated():
            run()
        captured = CapturedGraph(shape, inputs, out, capturer.capture(run), slots)
        self._captured[shape, slots is not None] = captured

    def forget(self) -> None:
        """Drop the graphs, because the buffers that they read will be replaced."""
        self._captured.clear()

    @property
    def shapes(self) -> list[GraphShape]:
        """Shapes that are captured now."""
        return list(dict.fromkeys(shape for shape, _ in self._captured))

    def graph_for(self, step: DeviceStep, *, adapted: bool = False) -> CapturedGraph | None:
        """Return the smallest graph that the step can be padded to, or None. `adapted`: whether it has adapters."""
        num_tokens, num_requests = step.num_tokens, len(step.rows)
        if step.num_sampled > len(self._inputs.last_tokens):
            return None
        shapes = self._decodes if step.is_decode else self._mixed
        for shape in shapes[bisect_left(shapes, (num_tokens,)) :] if num_tokens else ():
            padding, spare = shape.num_tokens - num_tokens, shape.num_requests - num_requests
            if spare >= 0 and padding <= spare * self._max_model_len:
                return self._captured.get((shape, adapted))
        return None


def _up_to(largest: int, sizes: Iterable[int]) -> list[int]:
    return [*(size for size in sizes if size < largest), largest]


def _most_tokens(shapes: list[GraphShape], *, decodes: bool) -> int:
    return max((each.num_tokens for each in shapes if each.is_decode == decodes), default=0)
