"""What the loop needs of a runner. The loop sees no device, no tensor and no model.

Implementations: `runner.eager` (on the CPU), `runner.device_runner` (on a GPU), `runner.null` (waits as predicted).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from pagemill_engine.config import StepLimits
from pagemill_engine.ipc.messages import MemoryBudget
from pagemill_engine.runner.sleep import Sleeps
from pagemill_engine.scheduler.step import StepPlan, StepResult
from pagemill_protocol.pooling import PoolingSpec


class RunnerInfo(NamedTuple):
    """What a loaded runner offers."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    weights_digest: str
    kv_dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    compute: str
    """Type of float weights and which kernels run, for people."""
    device: str = "cpu"
    overlaps: bool = False
    """`launch` returns before the step has run, and overlapping pays: the loop overlaps unless it is configured not
    to."""
    memory: MemoryBudget | None = None
    step: StepLimits | None = None
    """What its steps may hold; `None`: what the settings say."""
    masks_tokens: bool = True
    """It samples only what `StepPlan.token_masks` allow."""
    pooling: PoolingSpec | None = None
    """It gives vectors or scores in place of tokens."""
    serves_adapters: bool = False
    """It takes requests for adapters; none does yet but a simulated one."""
    jumps_forward: bool = True
    """Several known tokens of a sequence cost a step less than as many steps. Not where steps of decodes alone are
    replayed as graphs, which one longer sequence prevents."""


class Runner(Sleeps, Protocol):
    """`launch` starts a step and returns at once where the device allows it; `wait` gives its tokens.

    Steps run in the order of their launch; one more may be launched before the last one was waited for. They are waited
    for in the same order. A step launched behind one that raises is not run and raises as well (`errors`).
    """

    @property
    def info(self) -> RunnerInfo: ...

    def launch(self, plan: StepPlan) -> Any:
        """Apply the plan's differences and start its forward pass and sampling; returns an opaque handle."""

    def wait(self, handle: Any) -> StepResult:
        """Block until the step of `handle` is done."""

    def close(self) -> None: ...
