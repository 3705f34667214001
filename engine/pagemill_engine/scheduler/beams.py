"""Beam search: decides which candidates continue, which are complete, and when the search ends.

A search is a group of sequences in lockstep. Each sequence that has computed all its tokens reports its most likely
next tokens and waits. When all have reported, the search decides: as many candidates as there are beams continue, and
complete ones among the best enter a pool of answers. `scheduler.scheduler` owns queues and KV blocks and forks
sequences as decided here. Selection and ending follow Hugging Face's `generate(num_beams=k)`; tests compare the two.

The score of a running sequence is the log probability of its output under the model. The score of a complete one is
that sum divided by its length to the power of `length_penalty`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

from pagemill_execution.step import TokenLogprobs
from pagemill_protocol.request.generate import FinishReason
from pagemill_protocol.request.sampling import SamplingParams


class BeamSequence(Protocol):
    """The attributes of a sequence that a search reads."""

    token_ids: list[int]
    num_prompt_tokens: int
    max_total_tokens: int
    stop_ids: frozenset[int]

    @property
    def num_output_tokens(self) -> int: ...


S = TypeVar("S", bound=BeamSequence)


@dataclass(slots=True, eq=False)
class Beam(Generic[S]):
    """A running sequence of a search."""

    sequence: S
    score: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per output token, if the client asked for log probabilities."""
    candidates: TokenLogprobs | None = None
    """Possible next tokens of the sequence; set while it waits for the other sequences."""


class BeamAnswer(NamedTuple):
    """A complete sequence."""

    token_ids: list[int]
    """Output tokens, including the stop token that completed the sequence."""
    logprobs: list[TokenLogprobs] | None
    score: float
    finish_reason: FinishReason


class Continuation(NamedTuple, Generic[S]):
    """A running sequence extended by one token."""

    beam: Beam[S]
    token_id: int
    score: float
    rank: int
    """Rank of the token among its sequence's candidates, from 1."""


class BeamSearch(Generic[S]):
    """One search. The scheduler calls `report` for each sequence, `decide` when all have reported, then
    `continue_with`."""

    def __init__(self, root: S, sampling: SamplingParams, first_choice: int) -> None:
        """Start a search with the sequence `root`.

        `sampling`: the parameters that the client sent. `first_choice`: the index of the best answer.
        """
        self.beams = [Beam(root)]
        """Running sequences, best first."""
        self.pool: list[BeamAnswer] = []
        """Complete sequences, best first."""
        self.choices = range(first_choice, first_choice + sampling.n)
        self.num_sequences_made = 1
        self.end_reported = False
        """Whether the end of the search was reported to the client."""
        self._width = sampling.num_sequences
        self._sampling = sampling
        self._stop_ids = root.stop_ids
        self._num_prompt_tokens = root.num_prompt_tokens
        self._max_output_tokens = root.max_total_tokens - root.num_prompt_tokens

    @property
    def sequences(self) -> list[S]:
        return [beam.sequence for beam in self.beams]

    def has_pending_beams(self, sequence: S) -> bool:
        return any(beam.sequence is sequence and beam.candidates is not None for beam in self.beams)

    def report(self, sequence: S, candidates: TokenLogprobs) -> bool:
        """Record the candidates of `sequence`. Returns whether every sequence has reported."""
        all_reported = True
        for beam in self.beams:
            if beam.sequence is sequence:
                beam.candidates = candidates
            all_reported = all_reported and beam.candidates is not None
        return all_reported

    def decide(self) -> list[Continuation[S]]:
        """Return the continuations, best first. An empty list means that the search is over and `pool` contains its
        answers."""
        num_tokens = self.beams[0].sequence.num_output_tokens + 1
        last = num_tokens >= self._max_output_tokens
        going_on: list[Continuation[S]] = []
        for place, candidate in enumerate(sorted(self._candidates(), key=attrgetter("score"), reverse=True)):
            if last or candidate.token_id in self._stop_ids:
                # A complete sequence counts only if it is among the best: otherwise a running one beats it.
                if place < self._width:
                    self._complete(candidate, num_tokens)
            elif len(going_on) < self._width:
                going_on.append(candidate)
        self.pool.sort(key=attrgetter("score"), reverse=True)
        del self.pool[self._width :]
        return [] if self._over(going_on, num_tokens) else going_on

    def continue_with(self, continuations: Collection[Continuation[S]], sequences: Collection[S]) -> None:
        """Replace the running beams by `sequences`, to which the continuations' tokens were appended."""
        self.beams = [
            Beam(sequence, each.score, [*each.beam.logprobs, *self._client_logprobs(each)])
            for each, sequence in zip(continuations, sequences, strict=True)
        ]

    def _candidates(self) -> Iterator[Continuation[S]]:
        for beam in self.beams:
            found = beam.candidates
            assert found is not None, "decided before all sequences reported"
            too_short = beam.sequence.num_output_tokens < self._sampling.min_tokens
            for rank, (token_id, logprob) in enumerate(zip(found.token_ids[1:], found.logprobs[1:], strict=True), 1):
                if not (too_short and token_id in self._stop_ids):
                    yield Continuation(beam, token_id, beam.score + logprob, rank)

    def _complete(self, candidate: Continuation[S], num_tokens: int) -> None:
        logprobs = None
        if self._sampling.logprobs is not None:
            logprobs = [*candidate.beam.logprobs, *self._client_logprobs(candidate)]
        output = candidate.beam.sequence.token_ids[self._num_prompt_tokens :]
        self.pool.append(
            BeamAnswer(
                token_ids=[*output, candidate.token_id],
                logprobs=logprobs,
                score=self._normalised(candidate.score, num_tokens),
                finish_reason="stop" if candidate.token_id in self._stop_ids else "length",
            )
        )

    def _over(self, going_on: list[Continuation[S]], num_tokens: int) -> bool:
        if not going_on:
            return True
        if len(self.pool) < self._width:
            return False
        early_stopping = self._sampling.early_stopping
        if early_stopping is True:
            return True
        # A positive penalty favours length: a running sequence scores highest at the length limit. Only "never" waits
        # for that.
        patient = early_stopping == "never" and self._sampling.length_penalty > 0
        best = self._normalised(going_on[0].score, self._max_output_tokens if patient else num_tokens)
        return best <= self.pool[-1].score

    def _normalised(self, score: float, num_tokens: int) -> float:
        return score / math.pow(num_tokens, self._sampling.length_penalty)

    def _client_logprobs(self, candidate: Continuation[S]) -> list[TokenLogprobs]:
        num_top = self._sampling.logprobs
        found = candidate.beam.candidates
        if num_top is None or found is None:
            return []
        logprob = found.logprobs[candidate.rank]
        token_ids = [candidate.token_id, *found.token_ids[1 : 1 + num_top]]
        return [TokenLogprobs(token_ids, [logprob, *found.logprobs[1 : 1 + num_top]], candidate.rank)]


def num_candidates(sampling: SamplingParams, num_stop_ids: int, vocab_size: int) -> int:
    """Return how many of its most likely tokens a sequence must report to have enough non-stop tokens to continue."""
    return min(max(sampling.num_sequences + num_stop_ids, sampling.logprobs or 0), vocab_size)


def most_blocks(sampling: SamplingParams, num_prompt_tokens: int, max_total_tokens: int, block_size: int) -> int:
    """Return the most KV blocks that a search can use: the prompt's full blocks once, the others once per beam."""
    shared = num_prompt_tokens // block_size
    return shared + sampling.num_sequences * (-(-(max_total_tokens - 1) // block_size) - shared)
