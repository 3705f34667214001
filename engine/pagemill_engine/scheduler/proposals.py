"""Asks for tokens that may follow decodes, so that one step verifies several, and decides how many are verified.

A proposed token is no token of its sequence before the model has sampled it: it counts for the step's budget and
blocks, and nowhere else. Sequences run ahead of their step in flight unless more is expected from proposals behind it:
then the whole step waits, since a batch that runs in two parts reads the weights twice. `proposing` has the proposers,
the chances and the choice; `scheduler` schedules and applies proposals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from pagemill_engine.proposing.acceptance import Acceptance
from pagemill_engine.proposing.base import Method, ProposalSource, Proposing
from pagemill_engine.proposing.draft import DraftProposer, Rounds
from pagemill_engine.proposing.gain import MeasuredSteps, MsOf, StepShape, can_gain, choose, most_of_same_rounding
from pagemill_engine.proposing.prediction import PredictionMethod
from pagemill_engine.scheduler.sequence import Sequence, SequenceState
from pagemill_engine.scheduler.token_masks import masks_along
from pagemill_execution.step import StepPlan, StepResult

if TYPE_CHECKING:
    from pagemill_engine.scheduler.restriction import Mask
    from pagemill_engine.scheduler.sequences import Sequences

MOST_PROPOSED = 8
"""Tokens proposed for a sequence in one step."""

MOST_TOKENS = 512
"""Tokens of prompts that a step is taken to have at most."""
STEP_GAIN = 0.01
"""Weight of the latest step in what decodes sample."""
TURN_GAIN = 0.1
"""Weight of the latest measurement."""


class Proposal(NamedTuple):
    token_ids: list[int]
    masks: list[Mask | None] | None
    """The mask of each token that may be sampled, one more than tokens; None: any token, here and for all."""


class Proposals:
    def __init__(
        self,
        methods: Iterable[Method],
        most: int = MOST_PROPOSED,
        *,
        ms_of: MsOf | None = None,
        rounds: Rounds | None = None,
        rounding_rows: tuple[int, ...] = (),
    ) -> None:
        """`methods`: those that are asked for every sequence, beside what clients predict. `most`: tokens proposed for
        a sequence in one step. `ms_of`: the step times by which the number is chosen; without, everything is proposed.
        `rounds`: of a runner that drafts, for `DraftMethod`. `rounding_rows`: as in `RunnerInfo`; a step that has fewer
        tokens without proposals has fewer with them, so that no bit depends on how many are chosen."""
        self._methods = [(each, Acceptance()) for each in (PredictionMethod(), *methods)]
        """With what is known about all proposals of each."""
        self._asks_all = len(self._methods) > 1
        self._most = most
        self.is_active = self._asks_all
        """Whether a sequence may have proposals."""
        self._ms_of = ms_of
        self._rounds = rounds
        self._rounding_rows = rounding_rows
        self._measured = MeasuredSteps()
        self._gained_ms = 0.0
        self.per_decode = (1.0, 1.0, 0.0)
        """Tokens that a decode has sampled, and computed, in a step of late, and milliseconds of drafting behind it."""
        self._turn_ms = 0.0
        """Milliseconds between a step and one that waits for its tokens, in a loop that runs ahead otherwise."""

    def expect(self, predicted_token_ids: list[int]) -> None:
        """Note what the client of a new request predicts."""
        self.is_active = self.is_active or bool(predicted_token_ids)

    def record_turn(self, ms: float) -> None:
        """Record the time from the end of a step to the launch of one that had to wait for it, in a loop that does not
        wait otherwise."""
        self._turn_ms += TURN_GAIN * (ms - self._turn_ms)

    def record_step(self, plan: StepPlan, result: StepResult, ms: float) -> None:
        """Record what a step has sampled, and its time, if it has decodes alone: prompts hide what proposed tokens
        take."""
        if num_sampling := len(plan.samples):
            num_proposed = sum(map(len, plan.proposals.values()))
            num_accepted = sum(len(result.token_ids[name]) - 1 for name in plan.proposals if name in result.token_ids)
            now = 1 + num_accepted / num_sampling, 1 + num_proposed / num_sampling, result.draft_ms
            sampled, computed, draft_ms = (
                before + STEP_GAIN * (latest - before) for before, latest in zip(self.per_decode, now, strict=True)
            )
            self.per_decode = sampled, computed, draft_ms
        if self._ms_of is not None and not plan.chunk_context_products:
            predicted_ms = self._ms_of(plan.num_tokens, plan.decode_context_tokens)
            self._measured.record(plan.num_tokens, predicted_ms, ms, proposed=bool(plan.proposals))

    def keep_waiting(self, all_sequences: Sequences) -> bool:
        """Whether the next step waits for the tokens of the step in flight, where sequences run ahead of it: of some
        it is not known how many there are, some are drafted behind it, or proposals behind them gain more."""
        running = [*all_sequences.running]
        if any(seq.num_pending_tokens > 1 for seq in running) or any(
            step.plan.drafts for step in all_sequences.in_flight
        ):
            return True
        seqs = [seq for seq in running if seq.num_pending_tokens and not (seq.search or seq.pooling)]
        return bool(self.choose(seqs, running, all_sequences.num_queued_tokens, 1))

    def choose(
        self, sequences: list[Sequence], turn: list[Sequence], num_queued_tokens: int, num_pending: int = 0
    ) -> list[tuple[Sequence, list[int]]]:
        """Return those of `sequences` for which tokens are proposed in a step, with these tokens.

        `turn`: all running ones of which it may compute tokens. `num_queued_tokens`: of those that wait. `num_pending`:
        tokens of the sequences that are not known yet.
        """
        if not self._asks_all:
            sequences = [sequence for sequence in sequences if sequence.predicted_token_ids]
        if not sequences:
            return []
        step = _step_shape(turn, num_queued_tokens)
        if self._ms_of is not None and not can_gain(len(sequences), self._most, step, self._ms_of):
            return []
        found, chances = [], []
        for sequence in sequences:
            # The last token that may be sampled comes after the proposed ones.
            most = min(self._most + num_pending, sequence.max_total_tokens - len(sequence.token_ids) - 1)
            if most <= num_pending:
                continue
            proposing = sequence.proposing or self._begin(sequence)
            along = ask(proposing, sequence.token_ids, most)
            if len(along) > num_pending:
                found.append((sequence, proposing.token_ids[num_pending:]))
                chances.append(along[num_pending:])
        if self._ms_of is None or not found:
            return found
        most_in_all = most_of_same_rounding(step, self._rounding_rows)
        numbers = choose(chances, step, self._ms_of, self._turn_ms, self._measured.factor, most_in_all)
        if any(numbers) and not num_pending:
            base_ms = self._ms_of(step.num_tokens, step.num_context_tokens)
            size = step.num_tokens + sum(numbers)
            longer_ms = self._ms_of(size, step.num_context_tokens) * self._measured.factor(size)
            self._gained_ms -= self._turn_ms + longer_ms - base_ms
            for sequence, _ in found:
                if sequence.proposing is not None:
                    sequence.proposing.token_ms = base_ms / max(1, step.num_sampling)
        return [(seq, tokens[:num]) for (seq, tokens), num in zip(found, numbers, strict=True) if num]

    def count(self, sequence: Sequence, num_accepted: int) -> None:
        """Count the steps that a sequence does not need, since it sampled some of its proposed tokens."""
        if sequence.proposing is not None:
            self._gained_ms += sequence.proposing.token_ms * num_accepted

    def take_gain(self) -> float:
        """Return the milliseconds that were saved since the last call."""
        gained_ms, self._gained_ms = self._gained_ms, 0.0
        return gained_ms

    def plan_drafts(self, plan: StepPlan, all_sequences: Sequences) -> None:
        """Decide how many tokens the runner drafts behind a step, for the next one to verify."""
        if self._rounds is None:
            return
        rooms, acceptances = {}, []
        for name in plan.num_scheduled_tokens:
            sequence = all_sequences.by_id[name]
            room = sequence.max_total_tokens - sequence.num_tokens - 2  # what is sampled in this step and the next
            if name not in plan.samples or room < 1 or sequence.search is not None or sequence.pooling is not None:
                continue
            source = self._draft_source(sequence)
            if source is not None:
                rooms[name] = room
                acceptances.append(source.acceptance)
        if rooms:
            step = _step_shape([*all_sequences.running], all_sequences.num_queued_tokens)
            num = self._rounds.choose(acceptances, step, self._ms_of, self._turn_ms)
            most = most_of_same_rounding(step, self._rounding_rows)
            num = num if most is None else min(num, most)
            plan.drafts = {name: min(num, room) for name, room in rooms.items()} if num else {}

    def take_drafts(self, result: StepResult, sequences: Mapping[str, Sequence]) -> None:
        """Note what was drafted behind a step whose tokens were taken. `sequences`: by id."""
        if self._rounds is None:
            return
        self._rounds.record(max(map(len, result.drafted.values())), result.draft_ms)
        self._gained_ms -= result.draft_ms
        for name, drafted in result.drafted.items():
            sequence = sequences.get(name)
            if sequence is None or sequence.state is not SequenceState.RUNNING or sequence.was_jumped:
                continue
            source = self._draft_source(sequence)
            if source is not None and isinstance(source.proposer, DraftProposer):
                source.proposer.take(drafted)

    def _draft_source(self, sequence: Sequence) -> ProposalSource | None:
        sources = (sequence.proposing or self._begin(sequence)).sources
        return next((source for source in sources if isinstance(source.proposer, DraftProposer)), None)

    def fitting(self, sequence: Sequence, token_ids: list[int], most: int) -> Proposal | None:
        """Return as many of the proposed tokens as may be sampled, at most `most`, or None."""
        token_ids, masks = masks_along(sequence, token_ids[:most])
        return Proposal(token_ids, masks) if token_ids else None

    def _begin(self, sequence: Sequence) -> Proposing:
        sources = []
        for method, acceptance in self._methods:
            proposer = method.begin(sequence)
            if proposer is not None:
                sources.append(ProposalSource(proposer, Acceptance(acceptance)))
        sequence.proposing = Proposing(sources)
        return sequence.proposing

    def end(self, sequence: Sequence) -> None:
        """Take note that a sequence has ended."""
        if sequence.proposing is not None:
            for method, _ in self._methods:
                method.end(sequence)


def _step_shape(turn: list[Sequence], num_queued_tokens: int) -> StepShape:
    """Return what a step without proposals would compute. Its budget is no bound: a proposal takes the place of a
    token of a prompt then, which is what a longer step costs."""
    num_decodes = num_context_tokens = 0
    num_tokens = num_queued_tokens
    for seq in turn:
        num_due_tokens = len(seq.token_ids) + seq.num_pending_tokens - seq.num_computed_tokens
        num_tokens += num_due_tokens
        if num_due_tokens == 1:
            num_decodes += 1
            num_context_tokens += seq.num_computed_tokens
    return StepShape(min(num_tokens, MOST_TOKENS + len(turn)), num_decodes, num_context_tokens)


def ask(proposing: Proposing, known: list[int], most: int) -> list[float]:
    """Note what may follow the known tokens of a sequence, after learning from the last proposal. Returns for each
    token the chance that it and all before it are sampled."""
    if (before := proposing.source) is not None:
        proposed, start = proposing.token_ids, proposing.start
        num_known = min(len(proposed), len(known) - start)
        num_right = 0
        while num_right < num_known and proposed[num_right] == known[start + num_right]:
            num_right += 1
        before.acceptance.learn(proposing.agreement, num_right, num_known)
        proposing.source = None
    best, most_expected = [], 0.0
    for source in proposing.sources:
        token_ids = source.proposer.propose(most)
        if not token_ids:
            continue
        along = source.acceptance.along(source.proposer.agreement, len(token_ids))
        if (expected := sum(along)) > most_expected:
            best, most_expected = along, expected
            proposing.source, proposing.token_ids = source, token_ids
            proposing.agreement = source.proposer.agreement
    proposing.start = len(known)
    return best


def may_propose(sequence: Sequence) -> bool:
    """Whether tokens may be proposed for a running sequence: it decodes, and its newest token is known."""
    return (
        not sequence.num_pending_tokens
        and len(sequence.token_ids) - sequence.num_computed_tokens == 1
        and sequence.search is None
        and sequence.pooling is None
        and not sequence.aborted
    )
