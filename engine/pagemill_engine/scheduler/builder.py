"""Writes one `StepPlan`: what is left of the token budget, and how a row enters and leaves the plan."""

from __future__ import annotations

from pagemill_engine.kv.manager import NOTHING_NEW, Allocation
from pagemill_engine.scheduler.request import Request
from pagemill_engine.scheduler.step import AdmittedRow, StepPlan


class StepBuilder:
    def __init__(self, plan: StepPlan, budget: int) -> None:
        self.plan = plan
        self.budget = budget
        """Tokens that may still be given out."""
        self.reserved_blocks = 0
        """Blocks that running prefills still need after this step."""

    def place(self, row: Request, num_tokens: int, allocation: Allocation) -> None:
        """A row that the runner knows already."""
        if allocation is not NOTHING_NEW:
            self.note_blocks(row, allocation)
        self._count(row, num_tokens, 1)

    def finish_decodes(self, num_context_tokens: int) -> None:
        """All that is in the plan so far is decodes: they sample. Tokens: those they read, summed as they came in."""
        self.plan.samples.update(self.plan.num_scheduled_tokens)
        self.plan.decode_context_tokens += num_context_tokens

    def note_blocks(self, row: Request, allocation: Allocation) -> None:
        plan = self.plan
        if allocation.new_block_ids:
            plan.new_block_ids[row.request_id] = allocation.new_block_ids
        if allocation.replaced is not None:
            index, source, copy = allocation.replaced
            plan.replaced_blocks.append((row.request_id, index, copy))
            plan.block_copies.append((source, copy))

    def admit(self, row: Request, num_tokens: int, allocation: Allocation, block_ids: list[int]) -> None:
        """A row that starts, or starts over."""
        if allocation.replaced is not None:
            _, source, copy = allocation.replaced
            self.plan.block_copies.append((source, copy))
        self.plan.admitted.append(
            AdmittedRow(
                request_id=row.request_id,
                token_ids=list(row.token_ids),
                num_prompt_tokens=row.num_prompt_tokens,
                num_computed_tokens=row.num_computed_tokens,
                block_ids=block_ids,
                sampling=row.sampling,
                choice=row.choice,
                seed=row.seed,
                eos_token_ids=row.eos_token_ids,
            )
        )
        self._count(row, num_tokens, 1)

    def withdraw(self, row: Request) -> None:
        """Undo `place`: the row is preempted in favour of another one. Call before its blocks are freed."""
        plan = self.plan
        num_tokens = plan.num_scheduled_tokens.get(row.request_id)
        if num_tokens is None:
            return
        self._count(row, num_tokens, -1)
        plan.new_block_ids.pop(row.request_id, None)
        copies = {copy for owner, _, copy in plan.replaced_blocks if owner == row.request_id}
        if copies:
            plan.replaced_blocks = [entry for entry in plan.replaced_blocks if entry[0] != row.request_id]
            plan.block_copies = [pair for pair in plan.block_copies if pair[1] not in copies]

    def _count(self, row: Request, num_tokens: int, sign: int) -> None:
        plan = self.plan
        due = row.num_due_tokens
        context = row.num_computed_tokens + num_tokens
        self.budget -= sign * num_tokens
        if due == 1:
            plan.decode_context_tokens += sign * context
        else:
            plan.chunk_context_products += sign * num_tokens * context
        if sign < 0:
            del plan.num_scheduled_tokens[row.request_id]
            plan.samples.discard(row.request_id)
            return
        plan.num_scheduled_tokens[row.request_id] = num_tokens
        if num_tokens == due:
            plan.samples.add(row.request_id)
