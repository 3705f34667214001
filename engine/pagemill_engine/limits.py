"""The limits of the scheduler: the device's capacity and the configured settings.

The engine process computes them once (`loop.limits`) and sends them to the server in `Ready`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pagemill_execution.config import CPU_STEP, MOST_PROPOSED
from pagemill_protocol.report.cache_kinds import ANY_LENGTH, FULL, CacheKind, most_held, most_of_first
from pagemill_protocol.request.pooling import PoolingSpec
from pagemill_protocol.request.sampling import MAX_ANSWER_VALUES


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    num_blocks: int
    """Blocks of the first cache kind, which keeps most."""
    block_size: int
    max_model_len: int
    """Largest number of tokens of prompt and output together."""
    vocab_size: int
    max_num_seqs: int = CPU_STEP.max_num_seqs
    max_num_batched_tokens: int = CPU_STEP.max_num_batched_tokens
    max_num_waiting: int = 1024
    max_answer_values: int = MAX_ANSWER_VALUES
    policy: Literal["fcfs", "priority", "shortest-prefill-first"] = "fcfs"
    enable_prefix_caching: bool = True
    eos_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    """Seed for requests that send none; None draws one for each request."""
    weights_digest: str = ""
    kv_dtype: str = ""
    pooling: PoolingSpec | None = None
    """The result of a pooling model, whose requests get vectors or scores; None: the model generates tokens."""
    kinds: tuple[CacheKind, ...] = (FULL,)
    """The cache kinds of the model's layers."""
    kind_blocks: tuple[int, ...] = ()
    """Blocks of each kind; none: `num_blocks` of the only one."""
    shares_memory: bool = False
    """Whether memory moves between the first and the last kind; `kind_blocks` are then those at the start."""
    serves_adapters: bool = False
    most_jumped: int = MOST_PROPOSED
    """Tokens that a form leaves no choice about and that are taken at once instead of sampled."""

    @property
    def max_total_tokens(self) -> int:
        """The most tokens that one request can reach. The newest token needs no KV slot: it is sampled but not
        computed."""
        return min(self.max_model_len, self.cache_tokens + 1)

    @property
    def cache_tokens(self) -> int:
        """The most tokens of one request that the cache holds."""
        step_tokens, size, first = self.max_num_batched_tokens, self.block_size, self.kinds[0]
        if not first.keeps_all and most_held(first, 0, ANY_LENGTH, step_tokens, size) <= self.num_blocks:
            return ANY_LENGTH
        if not self.shares_memory:
            return self.num_blocks * size
        return most_of_first(self.kinds, self.blocks_of_kinds, step_tokens, size) * size

    @property
    def blocks_of_kinds(self) -> tuple[int, ...]:
        return self.kind_blocks or (self.num_blocks,)

    @property
    def max_prompt_tokens(self) -> int:
        """The most tokens of a prompt. At least one token follows it, unless the prompt is pooled."""
        return self.max_model_len - 1 if self.pooling is None else self.max_model_len

    @property
    def whole_prompts(self) -> bool:
        """Whether every prompt must be computed in one step."""
        return self.pooling is not None and self.pooling.whole_prompts
