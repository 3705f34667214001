"""Recorded steps: decodes by padded numbers of requests, steps that hold prompts by padded numbers of tokens and of
requests, all in one pool of memory.

A recorded pass reads and writes the same places each time: `StepGraphs` owns those places and knows the shapes. A
decode is recorded up to the logits; of other steps few tokens sample, and their logits are launched behind the
recording. Recording itself is `CudaRecorder`'s alone. When a recording is used decides `device_runner`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pagemill_engine.runner.device_forward import DeviceForward
from pagemill_engine.runner.device_rows import DeviceStep
from pagemill_kernels.request_rows.layout import StepInputs

MOST_REQUESTS = 512
"""Larger decodes keep the device busy for so long that launching them one by one costs nothing."""
MOST_TOKENS = 8192
"""Of a step that holds prompts: likewise, even of the smallest models."""
_SMALL = (16, 32, 64, 96, 128, *range(192, 513, 64), *range(640, 1025, 128))
_OCTAVE = (36, 40, 45, 50, 57, 64)
"""Thirty-seconds of a power of two: no step above 1,024 tokens is padded by more than a seventh."""
_TOKENS = (*_SMALL, *(part * power // 32 for power in (1024, 2048, 4096) for part in _OCTAVE))
_REQUESTS = (64,)
"""Numbers of requests that are recorded beside the largest: attention launches programs for each that there may be."""


class Shape(NamedTuple):
    """What a recorded step is padded to."""

    num_tokens: int
    num_requests: int
    is_decode: bool


def decode_shapes(max_num_seqs: int) -> list[Shape]:
    """Rising: other decodes are padded to the next one, by an eighth of it at most or 8."""
    largest = min(max_num_seqs, MOST_REQUESTS)
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, MOST_REQUESTS + 1, 32)]
    return [Shape(size, size, is_decode=True) for size in _up_to(largest, sizes)]


def mixed_shapes(max_num_seqs: int, max_num_batched_tokens: int, most_tokens: int = MOST_TOKENS) -> list[Shape]:
    """Rising: of steps that hold prompts, whether or not requests decode in them. There is always room for a padding
    request, which the padding tokens belong to. None is larger than `most_tokens`, but for those below 1,024."""
    found = []
    largest = max(size for size in _TOKENS if size <= max(most_tokens, _SMALL[-1]))
    for num_tokens in _up_to(min(max_num_batched_tokens, largest), _TOKENS):
        most = min(num_tokens, max_num_seqs + 1)
        found += [Shape(num_tokens, size, is_decode=False) for size in _up_to(most, _REQUESTS)]
    return found


def recorded_shapes(max_num_seqs: int, max_num_batched_tokens: int, most_tokens: int = MOST_TOKENS) -> list[Shape]:
    """All that are recorded; `most_tokens`: of a step that holds prompts."""
    decodes = decode_shapes(min(max_num_seqs, max_num_batched_tokens))
    return [*decodes, *mixed_shapes(max_num_seqs, max_num_batched_tokens, most_tokens)]


class Recorder(Protocol):
    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns what runs it on the same places whenever it is called. `run` must not wait for the device, and
        compiles and tunes nothing any more."""


class CudaRecorder:
    """CUDA graphs that share one pool, since no two of them run at a time. The pool's memory goes with the last of
    them."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


@dataclass(slots=True, frozen=True)
class Recording:
    """One recorded shape."""

    shape: Shape
    inputs: StepInputs
    """To be filled before `run`."""
    out: Tensor
    replay: Callable[[], None]

    def run(self) -> Tensor:
        """A decode's logits, float32 [requests, vocab], else normalised hidden states [tokens, hidden]: until the next
        run of any."""
        self.replay()
        return self.out


class StepGraphs:
    def __init__(self, forward: DeviceForward, shapes: Iterable[Shape], table_width: int, max_model_len: int) -> None:
        """Holds nothing but buffers until `record`."""
        self._forward, self._max_model_len = forward, max_model_len
        shapes = sorted(shapes)
        # No padding request has more tokens than a row.
        possible = [each for each in shapes if each.num_tokens <= each.num_requests * max_model_len]
        self._decodes, self._mixed = ([each for each in possible if each.is_decode == kind] for kind in (True, False))
        most_tokens, most_requests = max(each.num_tokens for each in shapes), max(each.num_requests for each in shapes)
        self._inputs = forward.empty_inputs(most_tokens, most_requests, table_width)
        self._logits = forward.empty_logits(_most_tokens(shapes, decodes=True))
        self._hidden = forward.empty_hidden(_most_tokens(shapes, decodes=False))
        self._recordings: dict[Shape, Recording] = {}

    def record(self, recorder: Recorder, prepare: Callable[[Shape, StepInputs], None]) -> None:
        """Capture all shapes, the largest first: the others fit into its memory. `prepare` fills the inputs with
        padding requests."""
        for shape in sorted([*self._decodes, *self._mixed], reverse=True):
            inputs = self._inputs.first(shape.num_tokens, shape.num_requests)
            out = (self._logits if shape.is_decode else self._hidden)[: shape.num_tokens]
            run = self._forward.decode_into if shape.is_decode else self._forward.hidden_into
            record = partial(run, out, inputs)
            prepare(shape, inputs)
            # What is compiled, loaded or tuned once cannot be recorded.
            with self._forward.abbreviated():
                record()
            self._recordings[shape] = Recording(shape, inputs, out, recorder.record(record))

    def forget(self) -> None:
        """What they read lies elsewhere from now on."""
        self._recordings.clear()

    @property
    def shapes(self) -> list[Shape]:
        """Those that are recorded now."""
        return list(self._recordings)

    def recording_of(self, step: DeviceStep) -> Recording | None:
        """The smallest that the step can be padded to; `None`: it is launched piece by piece."""
        num_tokens, num_requests = step.num_tokens, len(step.rows)
        shapes = self._decodes if step.is_decode else self._mixed
        for shape in shapes[bisect_left(shapes, (num_tokens,)) :] if num_tokens else ():
            padding, room = shape.num_tokens - num_tokens, shape.num_requests - num_requests
            if room >= 0 and padding <= room * self._max_model_len:
                return self._recordings.get(shape)
        return None


def _up_to(largest: int, sizes: Iterable[int]) -> list[int]:
    return [*(size for size in sizes if size < largest), largest]


def _most_tokens(shapes: list[Shape], *, decodes: bool) -> int:
    return max((each.num_tokens for each in shapes if each.is_decode == decodes), default=0)
