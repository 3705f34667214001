"""The runner interface of the loop, which sees no device, no tensor and no model.

Implementations: `runners.eager` (on the CPU), `runners.device.device_runner` (on a GPU), `runners.null` (waits
for predicted times).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pagemill_execution.config import StepLimits
from pagemill_execution.runners.sleep import Sleeps
from pagemill_execution.sizing.kv_sizes import CacheBlocks
from pagemill_execution.sizing.memory import MemoryBudget
from pagemill_execution.step import StepPlan, StepResult
from pagemill_protocol.report.cache_kinds import FULL, CacheKind
from pagemill_protocol.report.state import RankTimes
from pagemill_protocol.request.pooling import PoolingSpec

if TYPE_CHECKING:
    from pagemill_execution.adapters.store import AdapterStore


class RunnerInfo(NamedTuple):
    """Properties of a loaded runner."""

    num_blocks: int
    """Blocks of the first cache kind, which keeps most."""
    block_size: int
    max_model_len: int
    vocab_size: int
    weights_digest: str
    kv_dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    compute: str
    """Type of float weights and the kernels in use, for people."""
    device: str = "cpu"
    overlaps: bool = False
    """Whether `launch` returns before the step has run and overlapping is faster. The loop then overlaps by default."""
    memory: MemoryBudget | None = None
    step: StepLimits | None = None
    """The step limits that the runner chose; None: the settings apply."""
    masks_tokens: bool = True
    """Whether it samples only tokens that `StepPlan.token_masks` allow."""
    pooling: PoolingSpec | None = None
    """Set if it returns vectors or scores instead of tokens."""
    serves_adapters: bool = False
    """Whether it accepts requests for adapters."""
    adapters: AdapterStore | None = None
    """The adapters that rows may use; None: of none, or of a simulated runner, which needs no matrices."""
    jumps_forward: bool = True
    """Whether several known tokens of a sequence take less time in one step than in as many steps.

    False where decode steps are replayed as CUDA graphs, which one longer sequence prevents.
    """
    stages: int = 1
    """Parts of the model that compute one behind the other, each another step at the same time."""
    check: Callable[[], None] = lambda: None
    """Raises `DeviceLostError` if what computes was lost while no step ran."""
    ranks: Callable[[], RankTimes | None] = lambda: None
    """Returns what its processes have computed; None: it is one."""
    most_proposed: int | None = None
    """Most proposed tokens of a request that can be taken back: rows of recurrent layers have room for so many. None:
    any number."""
    rounding_rows: tuple[int, ...] = ()
    """Numbers of tokens in a step, or of those sampled from, from which on its products round otherwise, in order."""
    drafts: bool = False
    """Whether it drafts tokens behind a step (`StepPlan.drafts`)."""
    kinds: tuple[CacheKind, ...] = (FULL,)
    """The cache kinds of the model's layers."""
    kind_blocks: tuple[int, ...] = ()
    """Blocks of each kind; none: `num_blocks` of the only one."""
    shares_memory: bool = False
    """Whether the blocks of the first and the last kind are in one arena, in which memory can move between them."""

    @property
    def blocks_of_kinds(self) -> tuple[int, ...]:
        return self.kind_blocks or (self.num_blocks,)

    def with_cache(self, cache: CacheBlocks, *, shares_memory: bool = False) -> RunnerInfo:
        """Return the properties with this cache. `shares_memory`: whether its kinds, if there are several, do."""
        counts = cache.counts if len(cache.counts) > 1 else ()
        return self._replace(
            num_blocks=cache.counts[0],
            kinds=cache.kinds,
            kind_blocks=counts,
            shares_memory=shares_memory and len(counts) > 1,
            most_proposed=cache.most_proposed,
        )


class Runner(Sleeps, Protocol):
    """Runs steps. `launch` starts a step, at once where the device allows it, and `wait` returns its tokens.

    Steps run in the order of their launch; one more may be launched before the last one was waited for. They are waited
    for in the same order. A step launched behind one that raises is not run and raises as well (`errors`).
    """

    @property
    def info(self) -> RunnerInfo: ...

    def launch(self, plan: StepPlan) -> Any:
        """Apply the plan's differences and start its forward pass and sampling. Returns an opaque handle."""

    def wait(self, handle: Any) -> StepResult:
        """Block until the step of `handle` is done and return its result."""

    def close(self) -> None: ...
