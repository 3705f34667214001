"""Sampling parameters as arrays indexed by the runner's rows, and the part of them that a step needs.

Those that scale, filter or penalise are whole records (`pagemill_kernels.sampling.columns`), of which none is named.

Token counts for penalties take memory of rows x vocabulary, so they are allocated with the first request that needs
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.step import AdmittedSequence
from pagemill_kernels.sampling import randomness
from pagemill_kernels.sampling.batch import Draws, Edits, NamedTokens, Penalties, Reports, SamplingBatch
from pagemill_kernels.sampling.columns import Settings
from pagemill_kernels.sampling.filters import DRAWS, is_drawn
from pagemill_kernels.sampling.penalties import PENALTIES


class TokenCounts(Protocol):
    """The tokens of each row's prompt and output, for all penalties, in the memory of the device that samples."""

    in_prompt: Any
    """bool [rows, vocab]."""
    in_output: Any
    """int32 [rows, vocab]: occurrences."""

    def reset(self, row: int, prompt: list[int], output: list[int]) -> None: ...


class HostCounts:
    """`TokenCounts` as numpy arrays; `runners.device.device_runner` has them as tensors of a device."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.in_prompt = np.zeros((max_rows, vocab_size), dtype=np.bool_)
        self.in_output = np.zeros((max_rows, vocab_size), dtype=np.int32)

    def reset(self, row: int, prompt: list[int], output: list[int]) -> None:
        self.in_prompt[row] = False
        self.in_prompt[row, prompt] = True
        self.in_output[row] = np.bincount(np.array(output, dtype=np.int64), minlength=self.in_output.shape[1])


@dataclass(slots=True)
class SamplingRows:
    """Sampling parameters by the runner's row. Values of unused rows are meaningless."""

    max_rows: int
    vocab_size: int
    make_counts: Callable[[int, int], TokenCounts] = HostCounts
    """Creates token counts from the numbers of rows and tokens."""
    draws: Settings = field(init=False)
    """Records of `DRAWS`."""
    penalties: Settings = field(init=False)
    """Records of `PENALTIES`."""
    min_tokens: NDArray[np.int64] = field(init=False)
    num_logprobs: NDArray[np.int64] = field(init=False)
    """Number of most likely tokens to report; -1: no log probabilities; 0 also if tokens are named."""
    seeds: NDArray[np.uint64] = field(init=False)
    choices: NDArray[np.int64] = field(init=False)
    penalised: NDArray[np.bool_] = field(init=False)
    plain: NDArray[np.bool_] = field(init=False)
    """Whether the row is greedy without penalties, bias, minimum or logprobs, so that argmax is enough."""
    logit_bias: dict[int, dict[int, float]] = field(init=False, default_factory=dict)
    """Bias by token id, by row."""
    stop_ids: dict[int, list[int]] = field(init=False, default_factory=dict)
    """Tokens masked until `min_tokens`; only for rows with such a minimum."""
    named: dict[int, list[int]] = field(init=False, default_factory=dict)
    """Tokens whose log probabilities are asked for, by row."""
    counts: TokenCounts | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.draws, self.penalties = DRAWS.empty(self.max_rows), PENALTIES.empty(self.max_rows)
        for name in ("min_tokens", "num_logprobs", "choices"):
            setattr(self, name, np.zeros(self.max_rows, dtype=np.int64))
        self.seeds = np.zeros(self.max_rows, dtype=np.uint64)
        self.penalised = np.zeros(self.max_rows, dtype=np.bool_)
        self.plain = np.zeros(self.max_rows, dtype=np.bool_)

    def admit(self, row: int, admitted: AdmittedSequence) -> None:
        params = admitted.sampling
        self.draws[row], self.penalties[row] = DRAWS.record(params), PENALTIES.record(params)
        named = params.logprob_token_ids is not None
        self.num_logprobs[row] = 0 if named else -1 if params.logprobs is None else params.logprobs
        self.seeds[row] = admitted.seed % 2**64
        self.choices[row] = admitted.choice
        self._admit_tokens(row, admitted)
        self.plain[row] = (
            params.greedy
            and not self.penalised[row]
            and not self.min_tokens[row]
            and params.num_alternatives is None
            and row not in self.logit_bias
        )

    def release(self, row: int) -> None:
        for values in (self.logit_bias, self.stop_ids, self.named):
            values.pop(row, None)

    def batch(self, rows: NDArray[np.int64], num_generated: NDArray[np.int64]) -> SamplingBatch:
        """Return the sampling settings of these rows.

        `num_generated`: tokens that each row has generated before this step.
        """
        if bool(self.plain[rows].all()):
            return SamplingBatch()
        return self.batch_beside_draws(rows, num_generated)._replace(draws=self._draws(rows, num_generated))

    def batch_of_drafts(self, rows: NDArray[np.int64], num_generated: NDArray[np.int64]) -> SamplingBatch:
        """Return the settings of a model that drafts: the same draws and biases. Nothing is counted or reported."""
        return SamplingBatch(draws=self._draws(rows, num_generated), edits=self._edits(rows, num_generated))

    def batch_beside_draws(self, rows: NDArray[np.int64], num_generated: NDArray[np.int64]) -> SamplingBatch:
        """Return the settings as `batch` does, without those that the device has: temperature, filters and seed."""
        return SamplingBatch(
            edits=self._edits(rows, num_generated), penalties=self._penalties(rows), reports=self._reports(rows)
        )

    def _draws(self, rows: NDArray[np.int64], num_generated: NDArray[np.int64]) -> Draws | None:
        """Return the random draws. The position in a row's random sequence is the number of its generated tokens."""
        settings = self.draws[rows]
        if not is_drawn(settings).any():
            return None
        return Draws(settings, randomness.keys(self.seeds[rows], self.choices[rows], num_generated))

    def _edits(self, rows: NDArray[np.int64], num_generated: NDArray[np.int64]) -> Edits | None:
        """Return the biases, which also forbid stop tokens before `min_tokens` tokens were generated."""
        if not self.logit_bias and not self.stop_ids:
            return None
        found = [(i, *edit) for i, row in enumerate(rows.tolist()) for edit in self._row_edits(row, num_generated[i])]
        if not found:
            return None
        indices, token_ids, biases = zip(*found, strict=True)
        return Edits(np.array(indices), np.array(token_ids), np.array(biases, dtype=np.float32))

    def _row_edits(self, row: int, num_generated: int) -> Iterable[tuple[int, float]]:
        if row not in self.logit_bias and row not in self.stop_ids:
            return ()
        masked = self.stop_ids.get(row, []) if num_generated < self.min_tokens[row] else []
        return {**self.logit_bias.get(row, {}), **dict.fromkeys(masked, -math.inf)}.items()

    def _penalties(self, rows: NDArray[np.int64]) -> Penalties | None:
        chosen = np.flatnonzero(self.penalised[rows])
        if len(chosen) == 0 or self.counts is None:
            return None
        places = rows[chosen]
        return Penalties(
            rows=chosen,
            settings=self.penalties[places],
            count_rows=places,
            in_prompt=self.counts.in_prompt,
            in_output=self.counts.in_output,
        )

    def _reports(self, rows: NDArray[np.int64]) -> Reports | None:
        wanting = np.flatnonzero(self.num_logprobs[rows] >= 0)
        if len(wanting) == 0:
            return None
        return Reports(wanting, self.num_logprobs[rows[wanting]], self._named(rows[wanting]))

    def _named(self, rows: NDArray[np.int64]) -> NamedTokens | None:
        entries = [
            (place, column, token_id)
            for place, row in enumerate(rows.tolist())
            for column, token_id in enumerate(self.named.get(row, ()))
        ]
        return NamedTokens(*np.array(entries, dtype=np.int64).T) if entries else None

    def _admit_tokens(self, row: int, admitted: AdmittedSequence) -> None:
        params = admitted.sampling
        self.release(row)
        if params.logit_bias:
            self.logit_bias[row] = params.logit_bias
        if params.logprob_token_ids:
            self.named[row] = params.logprob_token_ids
        stop_ids = sorted({*params.stop_token_ids, *admitted.eos_token_ids})
        self.min_tokens[row] = params.min_tokens if stop_ids else 0
        if self.min_tokens[row]:
            self.stop_ids[row] = stop_ids
        self.penalised[row] = not PENALTIES.are_neutral(params)
        if not self.penalised[row]:
            return
        if self.counts is None:
            self.counts = self.make_counts(self.max_rows, self.vocab_size)
        prompt = admitted.token_ids[: admitted.num_prompt_tokens]
        self.counts.reset(row, prompt, admitted.token_ids[admitted.num_prompt_tokens :])
