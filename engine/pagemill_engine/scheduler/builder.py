"""Builds one `StepPlan`: tracks the token budget, adds and removes sequences, and adds log probabilities of prompts.

Positions of a prompt that an earlier step reported are not reported again when they are computed again (after a
preemption, or by another choice that takes over). Positions that were not reported have to be computed, whatever the
prefix cache contains. The runner computes the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.kv.tables import NO_NEW_BLOCKS, Allocation, Needs
from pagemill_engine.scheduler.proposals import Proposal
from pagemill_engine.scheduler.sequence import Sequence
from pagemill_execution.step import AdmittedSequence, HeldBlocks, PromptTargets, StepPlan, TableChanges


class StepBuilder:
    def __init__(self, number: int, num_kinds: int, budget: int) -> None:
        self.plan = StepPlan(number, {}, tables=[TableChanges() for _ in range(num_kinds)])
        self.budget = budget
        """Tokens of the budget that are left."""
        self.reserved: Needs = [0] * num_kinds
        """Blocks of each kind that running prefills still need after this step."""

    def reserve(self, needs: Needs, sign: int = 1) -> None:
        self.reserved = [before + sign * need for before, need in zip(self.reserved, needs, strict=True)]

    def place(self, sequence: Sequence, num_tokens: int, allocation: Allocation) -> None:
        """Add a sequence that the runner already knows."""
        if allocation is not NO_NEW_BLOCKS:
            self.note_blocks(sequence, allocation)
        self._count(sequence, num_tokens, 1)

    def verify(self, sequence: Sequence, proposal: Proposal, allocation: Allocation) -> None:
        """Add a decode with proposed tokens behind its own."""
        self.place(sequence, 1 + len(proposal.token_ids), allocation)
        self.plan.proposals[sequence.request_id] = proposal.token_ids
        if proposal.masks is not None:
            self.plan.token_masks[sequence.request_id] = proposal.masks

    def finish_decodes(self, num_context_tokens: int) -> None:
        """Mark all sequences in the plan so far, which are decodes, as sampling.

        `num_context_tokens`: the context tokens that they read, summed.
        """
        self.plan.samples.update(self.plan.num_scheduled_tokens)
        self.plan.decode_context_tokens += num_context_tokens

    def note_blocks(self, sequence: Sequence, allocation: Allocation) -> None:
        for changes, part in zip(self.plan.tables, allocation, strict=True):
            if part.new_block_ids:
                changes.appended[sequence.request_id] = part.new_block_ids
            if part.replaced is not None:
                index, source, copy = part.replaced
                changes.placed.append((sequence.request_id, index, copy))
                changes.copies.append((source, copy))
            for index, block_id in part.placed:
                changes.placed.append((sequence.request_id, index, block_id))

    def admit(
        self, sequence: Sequence, num_tokens: int, allocation: Allocation, held: list[tuple[int, list[int]]]
    ) -> None:
        """Add a sequence that starts or restarts, or whose tokens the runner does not know."""
        sequence.was_jumped = False
        for changes, part in zip(self.plan.tables, allocation, strict=False):
            if part.replaced is not None:
                _, source, copy = part.replaced
                changes.copies.append((source, copy))
        self.plan.admitted.append(
            AdmittedSequence(
                request_id=sequence.request_id,
                token_ids=list(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                tables=[HeldBlocks(first, block_ids) for first, block_ids in held],
                sampling=sequence.sampling,
                choice=sequence.noise,
                seed=sequence.seed,
                pooling=sequence.pooling,
                eos_token_ids=sequence.eos_token_ids,
                adapter_digest=sequence.adapter_digest,
            )
        )
        self._count(sequence, num_tokens, 1)

    def withdraw(self, sequence: Sequence) -> None:
        """Undo `place` or `admit` for a sequence that is preempted. Call this before its blocks are freed."""
        plan = self.plan
        num_tokens = plan.num_scheduled_tokens.get(sequence.request_id)
        if num_tokens is None:
            return
        self._count(sequence, num_tokens, -1)
        plan.proposals.pop(sequence.request_id, None)
        plan.token_masks.pop(sequence.request_id, None)
        plan.admitted = [admitted for admitted in plan.admitted if admitted.request_id != sequence.request_id]
        for changes in plan.tables:
            changes.appended.pop(sequence.request_id, None)
            copies = {copy for owner, _, copy in changes.placed if owner == sequence.request_id}
            if copies:
                changes.placed = [entry for entry in changes.placed if entry[0] != sequence.request_id]
                changes.copies = [pair for pair in changes.copies if pair[1] not in copies]

    def _count(self, sequence: Sequence, num_tokens: int, sign: int) -> None:
        plan = self.plan
        due = sequence.num_due_tokens
        context = sequence.num_computed_tokens + num_tokens
        self.budget -= sign * num_tokens
        if due == 1:
            plan.decode_context_tokens += sign * context
        else:
            plan.chunk_context_products += sign * num_tokens * context
        if sign < 0:
            del plan.num_scheduled_tokens[sequence.request_id]
            plan.samples.discard(sequence.request_id)
            return
        plan.num_scheduled_tokens[sequence.request_id] = num_tokens
        if num_tokens == due:
            plan.samples.add(sequence.request_id)


def note_changes(plan: StepPlan, kv: CacheManager, running: Iterable[Sequence]) -> None:
    """Add what became of blocks beside the step's own writes: those that were dropped behind windows, and those that
    were moved. Rows that are not running get their tables when they are admitted."""
    for changes, dropped in zip(plan.tables, kv.take_dropped(), strict=True):
        changes.dropped = dropped
    if not (moves := kv.take_moves()):
        return
    rows = {sequence.request_id for sequence in running}
    for changes, moved in zip(plan.tables, moves, strict=True):
        changes.placed += [entry for entry in moved.placed if entry[0] in rows]
        changes.copies += moved.copies


def reusable_tokens(sequence: Sequence) -> int | None:
    """Return how many cached tokens the sequence may reuse; None means all of them."""
    if sequence.reads_all:
        return 0
    report = sequence.prompt_report
    if report is None or report.num_reported == sequence.num_prompt_tokens - 1:
        return None
    return report.num_reported


def prompt_targets(plan: StepPlan, reporting: Mapping[str, Sequence]) -> dict[str, PromptTargets]:
    """Return the prompt tokens that `plan` has to report, by request id.

    Call this before the plan's tokens count as computed.
    """
    found = {}
    for name, sequence in reporting.items():
        num_tokens = plan.num_scheduled_tokens.get(name)
        if num_tokens is None or sequence.prompt_report is None:
            continue
        start, report = sequence.num_computed_tokens, sequence.prompt_report
        first = max(start, report.num_reported)
        end = min(start + num_tokens, sequence.num_prompt_tokens - 1)
        if first < end:
            token_ids = sequence.token_ids[first + 1 : end + 1]
            found[name] = PromptTargets(first, first - start, token_ids, report.num_top)
    return found
