"""Runs encoders: a step computes whole prompts and keeps nothing for later steps.

So it has no persistent rows and no KV cache; `executing.eager` is the counterpart for decoders. `executing.pooling`
turns hidden states into vectors and scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_engine.decoders.on_torch.context import ForwardContext
from pagemill_engine.decoders.on_torch.decoder import Decoder
from pagemill_engine.decoders.on_torch.device_rotations import DeviceRotations
from pagemill_engine.decoders.on_torch.encoder_attention import plan_rectangles
from pagemill_engine.executing.base import RunnerInfo
from pagemill_engine.executing.pooling import Pooler
from pagemill_engine.scheduler.step import AdmittedSequence, StepPlan, StepResult
from pagemill_kernels.gpu.launch import upload
from pagemill_kernels.registry import Ops
from pagemill_kernels.torch_arrays import from_torch
from pagemill_protocol.request.pooling import PoolingParams
from pagemill_servers.process.malloc import trim_heap


class EncoderRunner:
    def __init__(self, model: Decoder, ops: Ops, rotations: DeviceRotations, info: RunnerInfo, pooler: Pooler) -> None:
        self.info = info
        self.model = model
        self._ops = ops
        self._rotations = rotations
        self._pooler = pooler
        self._windows = model.spec.decoder.windows()
        self._has_token_types = model.token_types is not None
        self._nothing = torch.empty(0, dtype=torch.int64, device=ops.device)

    def launch(self, plan: StepPlan) -> StepResult:
        prompts = plan.admitted
        if not prompts:
            return StepResult()
        with torch.inference_mode():
            lengths = [len(prompt.token_ids) for prompt in prompts]
            token_ids = np.concatenate([np.array(prompt.token_ids, dtype=np.int64) for prompt in prompts])
            hidden = from_torch(self.model(self._upload(token_ids), self._context(prompts, lengths)))
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

    def _context(self, prompts: list[AdmittedSequence], lengths: list[int]) -> ForwardContext:
        positions = self._upload(np.concatenate([np.arange(length) for length in lengths]))
        plan = plan_rectangles(lengths, self._ops.device)
        return ForwardContext(
            positions=positions,
            rotations=self._rotations.at(positions),
            kv_caches=[],
            kv_slots={},
            attention_plans=dict.fromkeys(self._windows, plan),
            token_types=self._upload(_token_types(prompts)) if self._has_token_types else None,
        )

    def _upload(self, array: NDArray[np.int64]) -> Tensor:
        return upload(array, self._ops.device)


def _token_types(prompts: list[AdmittedSequence]) -> NDArray[np.int64]:
    """Return 1 for the tokens of a pair's second text and 0 for others."""
    pieces = []
    for prompt in prompts:
        types = np.zeros(len(prompt.token_ids), dtype=np.int64)
        if prompt.pooling is not None and prompt.pooling.second_segment:
            types[prompt.pooling.second_segment :] = 1
        pieces.append(types)
    return np.concatenate(pieces)
