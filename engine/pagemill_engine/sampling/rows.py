"""What each running request asked of the sampler, as arrays indexed by the runner's rows.

Token counts for penalties take memory of rows x vocabulary, so they exist only from the first request that needs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_engine.scheduler.step import AdmittedRow

MIN_TEMPERATURE = 1e-5
"""Anything lower is greedy: dividing by it would leave float32's range."""


@dataclass(slots=True)
class TokenCounts:
    """Which tokens a row has seen: the ground of all penalties."""

    in_prompt: Tensor
    """bool [rows, vocab]."""
    in_output: Tensor
    """int32 [rows, vocab]: occurrences."""

    @classmethod
    def empty(cls, max_rows: int, vocab_size: int) -> TokenCounts:
        return cls(
            torch.zeros(max_rows, vocab_size, dtype=torch.bool), torch.zeros(max_rows, vocab_size, dtype=torch.int32)
        )

    def reset(self, row: int, prompt: list[int], output: list[int]) -> None:
        self.in_prompt[row] = False
        self.in_prompt[row, prompt] = True
        vocab_size = self.in_output.shape[1]
        self.in_output[row] = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab_size)


@dataclass(slots=True)
class SamplingRows:
    """Parameters by row. Rows are the runner's; values of rows that are not in use mean nothing."""

    max_rows: int
    vocab_size: int
    temperature: NDArray[np.float32] = field(init=False)
    top_k: NDArray[np.int64] = field(init=False)
    """vocab_size where all tokens are kept."""
    top_p: NDArray[np.float32] = field(init=False)
    min_p: NDArray[np.float32] = field(init=False)
    presence_penalty: NDArray[np.float32] = field(init=False)
    frequency_penalty: NDArray[np.float32] = field(init=False)
    repetition_penalty: NDArray[np.float32] = field(init=False)
    min_tokens: NDArray[np.int64] = field(init=False)
    num_logprobs: NDArray[np.int64] = field(init=False)
    """-1: none wanted."""
    seeds: NDArray[np.uint64] = field(init=False)
    choices: NDArray[np.int64] = field(init=False)
    penalised: NDArray[np.bool_] = field(init=False)
    plain: NDArray[np.bool_] = field(init=False)
    """Greedy, without penalties, bias, minimum or logprobs: argmax is all there is to do."""
    logit_bias: dict[int, tuple[list[int], list[float]]] = field(init=False, default_factory=dict)
    stop_ids: dict[int, list[int]] = field(init=False, default_factory=dict)
    """Tokens masked until `min_tokens`; only for rows that have such a minimum."""
    counts: TokenCounts | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            setattr(self, name, np.zeros(self.max_rows, dtype=np.float32))
        for name in ("top_k", "min_tokens", "num_logprobs", "choices"):
            setattr(self, name, np.zeros(self.max_rows, dtype=np.int64))
        self.seeds = np.zeros(self.max_rows, dtype=np.uint64)
        self.penalised = np.zeros(self.max_rows, dtype=np.bool_)
        self.plain = np.zeros(self.max_rows, dtype=np.bool_)

    def admit(self, row: int, admitted: AdmittedRow) -> None:
        params = admitted.sampling
        self.temperature[row] = params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0
        self.top_k[row] = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.repetition_penalty[row] = params.repetition_penalty
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.seeds[row] = admitted.seed % 2**64
        self.choices[row] = admitted.choice
        self._admit_tokens(row, admitted)
        self.plain[row] = (
            params.greedy
            and not self.penalised[row]
            and not self.min_tokens[row]
            and params.logprobs is None
            and row not in self.logit_bias
        )

    def release(self, row: int) -> None:
        self.logit_bias.pop(row, None)
        self.stop_ids.pop(row, None)

    def count(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Add newly generated tokens to the rows' counts."""
        if self.counts is None:
            return
        chosen = self.penalised[rows]
        self.counts.in_output[torch.from_numpy(rows[chosen]), torch.from_numpy(token_ids[chosen])] += 1

    def _admit_tokens(self, row: int, admitted: AdmittedRow) -> None:
        params = admitted.sampling
        self.release(row)
        if params.logit_bias:
            self.logit_bias[row] = (list(params.logit_bias), list(params.logit_bias.values()))
        stop_ids = sorted({*params.stop_token_ids, *admitted.eos_token_ids})
        self.min_tokens[row] = params.min_tokens if stop_ids else 0
        if self.min_tokens[row]:
            self.stop_ids[row] = stop_ids
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        self.penalised[row] = penalties != (0.0, 0.0, 1.0)
        if not self.penalised[row]:
            return
        if self.counts is None:
            self.counts = TokenCounts.empty(self.max_rows, self.vocab_size)
        prompt = admitted.token_ids[: admitted.num_prompt_tokens]
        self.counts.reset(row, prompt, admitted.token_ids[admitted.num_prompt_tokens :])
