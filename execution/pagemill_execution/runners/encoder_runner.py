"""Runs encoders: a step computes whole prompts and keeps nothing for later steps.

So it has no persistent rows and no KV cache; `runners.eager` is the counterpart for decoders. `runners.pooling`
turns hidden states into vectors and scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.runners.pooling import Pooler
from pagemill_execution.step import AdmittedSequence, StepPlan, StepResult
from pagemill_kernels.arrays import Array
from pagemill_protocol.request.pooling import PoolingParams
from pagemill_servers.process.malloc import trim_heap


class EncoderModel(Protocol):
    @property
    def has_token_types(self) -> bool:
        """Whether it distinguishes the texts of a pair."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in memory."""
        ...

    @property
    def classifier(self) -> Callable[[Array], Array] | None:
        """That of `StepModel`."""
        ...

    def hidden(
        self, token_ids: NDArray[np.int64], lengths: Sequence[int], token_types: NDArray[np.int64] | None
    ) -> Array:
        """Return the hidden states of whole prompts one after another, [tokens, hidden]."""
        ...


class EncoderRunner:
    def __init__(self, model: EncoderModel, info: RunnerInfo, pooler: Pooler) -> None:
        self.info = info
        self.model = model
        self._pooler = pooler

    def launch(self, plan: StepPlan) -> StepResult:
        prompts = plan.admitted
        if not prompts:
            return StepResult()
        lengths = [len(prompt.token_ids) for prompt in prompts]
        token_ids = np.concatenate([np.array(prompt.token_ids, dtype=np.int64) for prompt in prompts])
        hidden = self.model.hidden(token_ids, lengths, _token_types(prompts) if self.model.has_token_types else None)
        pieces = np.split(hidden, np.cumsum(lengths)[:-1])
        pooled = np.stack([self._pooler.pool(piece) for piece in pieces])
        names = [prompt.request_id for prompt in prompts]
        return self._pooler.finish(names, pooled, [prompt.pooling or PoolingParams() for prompt in prompts])

    def wait(self, handle: Any) -> StepResult:
        result: StepResult = handle
        return result

    def sleep(self) -> int:
        """Return memory to the system. There is no cache, and the weights stay."""
        trim_heap()
        return 0

    def wake(self) -> None:
        """Do nothing: only weights are in memory."""

    def close(self) -> None:
        """Do nothing: only weights are in memory."""


def _token_types(prompts: list[AdmittedSequence]) -> NDArray[np.int64]:
    """Return 1 for the tokens of a pair's second text and 0 for others."""
    pieces = []
    for prompt in prompts:
        types = np.zeros(len(prompt.token_ids), dtype=np.int64)
        if prompt.pooling is not None and prompt.pooling.second_segment:
            types[prompt.pooling.second_segment :] = 1
        pieces.append(types)
    return np.concatenate(pieces)
