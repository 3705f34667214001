"""The scheduler: every step it gives tokens to requests under one budget.

There is one rule: a row's `num_computed_tokens` catches up with its tokens. Prefix hits, chunked prefill and decode
are that rule with different numbers. A step's order is decodes, then prefills that run or wait as the policy ranks
them; when blocks run out, the newest row of the lowest priority loses its own, in a batch or out of it, and is later
computed anew. The scheduler runs nothing (`loop.core` does) and knows no tensor (`runner`).

Life of a row: `add` -> waiting -> `schedule` admits it -> `update` appends its tokens -> finished; or back to waiting
by preemption; or out at any point by `abort`.

The next step may be scheduled before the last one was read: what a step in flight computes and samples counts as
there, only the tokens' values are not known yet. What of it is void is in `scheduler.flights`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from pagemill_engine.ipc.messages import TokensOut
from pagemill_engine.kv.manager import NOTHING_NEW, Allocation, KVCacheManager
from pagemill_engine.scheduler.admission import Admission
from pagemill_engine.scheduler.builder import StepBuilder
from pagemill_engine.scheduler.choices import HeldChoices
from pagemill_engine.scheduler.finish import finish_reason
from pagemill_engine.scheduler.flights import Flight, Flights, may_follow
from pagemill_engine.scheduler.limits import SchedulerLimits
from pagemill_engine.scheduler.load import engine_load
from pagemill_engine.scheduler.outputs import OutputBox
from pagemill_engine.scheduler.policies import POLICIES
from pagemill_engine.scheduler.request import Request, RowState
from pagemill_engine.scheduler.rows import SortedRows, serving_key
from pagemill_engine.scheduler.searches import Searches, clash, rows_to_abort
from pagemill_engine.scheduler.soundness import PLACES, contradictions
from pagemill_engine.scheduler.step import StepPlan, StepResult, TokenLogprobs
from pagemill_protocol.errors import invalid_field
from pagemill_protocol.generate import FinishReason, GenerateRequest
from pagemill_protocol.state import EngineLoad

Clock = Callable[[], float]


class Scheduler:
    def __init__(self, limits: SchedulerLimits, clock: Clock = time.monotonic) -> None:
        self.limits = limits
        self.kv = KVCacheManager(
            limits.num_blocks, limits.block_size, enable_prefix_caching=limits.enable_prefix_caching
        )
        self.num_preemptions = 0
        self._clock = clock
        self._admission = Admission(limits)
        self._rank = POLICIES[limits.policy]
        self._waiting = SortedRows(self._rank)
        self._running = SortedRows(serving_key)
        self._held = HeldChoices()
        self._rows: dict[str, Request] = {}
        self._clients: dict[str, dict[int, Request]] = {}
        self._outputs = OutputBox()
        self._step = 0
        self._flights = Flights()
        self._released: list[str] = []
        self._suspects: list[Request] = []
        """Rows of a step that failed as a whole: each runs alone until it is cleared or found guilty."""
        self._forks: dict[str, Request] = {}
        """Rows that hold blocks and are in no batch: forks that wait, beams that wait for each other."""
        self._num_queued_tokens = 0
        """Tokens that waiting rows still have to compute."""
        self._beams = Searches(self.kv, self._outputs, self._rows, self._clients, self._forks, self._queue, self._leave)

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises `PagemillError` when it can never run or too many wait."""
        rows = self._admission.admit(request, now_s=self._clock(), num_waiting=self.num_waiting)
        known = self._clients.get(request.request_id, {})
        if clash(rows, known):
            raise invalid_field("request_id", f"Request {request.request_id[:80]} is already being served here.")
        mine = self._clients.setdefault(request.request_id, known)
        for row in rows:  # all of them before any may leave: the last one to leave takes the client's entry along
            mine[row.choice] = self._rows[row.request_id] = row
        live = []
        for row in rows:
            reason = finish_reason(row) if row.num_resumed_tokens else None
            if reason is None:
                live.append(row)
            else:
                self._finish(row, reason)
        if live:
            self._queue(live[0])
            for row in live[1:]:
                row.state = RowState.HELD
            self._held.hold(live[0], live[1:])

    def abort(self, client_request_id: str, choice: int | None = None) -> None:
        """Drop a client request or one choice of it, wherever it stands; unknown ones are ignored (they ended)."""
        rows = self._clients.get(client_request_id, {})
        for row in rows_to_abort(rows.values(), choice, self._flights.carries):
            if self._flights.carries(row):
                row.aborted = True
            else:
                self._finish(row, "abort")

    def raise_allowance(self, client_request_id: str, allowance: int) -> None:
        """Let its rows generate up to `allowance` tokens each; unknown requests are ignored (they ended)."""
        self._admission.raise_allowance(self._clients.get(client_request_id, {}).values(), allowance)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._beams.between_steps())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._held.num_held - self._beams.num_queued()

    @property
    def has_work(self) -> bool:
        return bool(self._rows) or len(self._outputs) > 0

    # -- schedule ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide one step and open its KV writes. An empty plan: nothing can run before a step in flight is read."""
        self._step += 1
        step = StepBuilder(StepPlan(self._step, {}), self.limits.max_num_batched_tokens)
        if self._suspects:
            if not self._flights:
                self._schedule_alone(self._suspects[0], step)
        else:
            preemptions = self.num_preemptions
            prefills = self._schedule_decodes(step)
            self._schedule_prefills(prefills, step, preemptions)
        plan = step.plan
        if plan.num_scheduled_tokens:
            plan.released, self._released = self._released, []
            self._launch(plan)
        return plan

    def _launch(self, plan: StepPlan) -> None:
        """From here on the step counts as run; what it samples is still to come."""
        self.kv.launch(plan.num_scheduled_tokens)
        for name in plan.samples:
            self._rows[name].num_pending_tokens += 1
        self._flights.launch(plan)

    def _schedule_decodes(self, step: StepBuilder) -> list[Request]:
        """Returns the running rows that are still in their prefill."""
        prefills = []
        overlaps, held, allocate_slots = len(self._flights) > 0, self._held, self.kv.allocate_slots
        # What every row of every step needs is looked up once, and no function is called that can be done without.
        running, scheduled, num_context_tokens = RowState.RUNNING, step.plan.num_scheduled_tokens, 0
        for row in list(self._running):
            if row.state is not running or (overlaps and not may_follow(row, held)):
                continue
            num_computed_tokens = row.num_computed_tokens
            if len(row.token_ids) + row.num_pending_tokens - num_computed_tokens > 1:
                prefills.append(row)
            elif step.budget > 0:
                allocation = allocate_slots(row, 1) or self._allocate(row, 1, step)
                if allocation is None:
                    continue
                if allocation is not NOTHING_NEW:
                    step.note_blocks(row, allocation)
                step.budget -= 1
                scheduled[row.request_id] = 1
                num_context_tokens += num_computed_tokens + 1
        step.finish_decodes(num_context_tokens)
        return [row for row in prefills if row.state is RowState.RUNNING]

    def _schedule_prefills(self, prefills: list[Request], step: StepBuilder, num_preemptions: int) -> None:
        """Those that run and those that wait, by rank, behind beams that only waited for each other: those decode.

        None starts when the first does not fit, nor after a preemption as long as anything runs or is in flight: a
        token that is not known yet cannot be computed anew. What runs has its blocks reserved, so that nothing is
        preempted after a start.
        """
        step.reserved_blocks = sum(
            self.kv.blocks_for(row.num_tokens) - self.kv.num_table_blocks(row) for row in prefills
        )
        running = deque(sorted(prefills, key=self._rank))
        beams = deque(self._beams.ready())
        fits = True
        while step.budget > 0:
            is_calm = self.num_preemptions == num_preemptions or not (self._running or self._flights)
            may_start = fits and is_calm and len(self._waiting) > 0 and len(self._running) < self.limits.max_num_seqs
            if may_start and beams:
                fits = self._start(beams.popleft(), step)
            elif may_start and (not running or self._rank(self._waiting.first()) < self._rank(running[0])):
                fits = self._start(self._waiting.first(), step)
            elif running:
                row = running.popleft()
                if row.state is RowState.RUNNING and row.request_id not in step.plan.num_scheduled_tokens:
                    self._continue(row, step)
            else:
                return

    def _schedule_alone(self, row: Request, step: StepBuilder) -> None:
        if row.state is RowState.RUNNING:
            self._continue(row, step)
            return
        while not self._start(row, step, alone=True):
            self._preempt(self._running.last_except(None), step)

    def _continue(self, row: Request, step: StepBuilder) -> None:
        num_tokens = min(row.num_due_tokens, step.budget)
        allocation = self._allocate(row, num_tokens, step)
        if allocation is not None:
            step.place(row, num_tokens, allocation)
            step.reserved_blocks -= len(allocation.new_block_ids)

    def _allocate(self, row: Request, num_tokens: int, step: StepBuilder) -> Allocation | None:
        """Open the write; take blocks from others until it fits. None: the row itself was the one to go."""
        spared = row if self._suspects else None
        while (allocation := self.kv.allocate_slots(row, num_tokens)) is None:
            victim, fork = self._running.last_except(spared), self._last_fork()
            if fork is not None and (victim is spared or serving_key(fork) > serving_key(victim)):
                self._drop_fork(fork)
                continue
            self._preempt(victim, step)
            if victim is row:
                return None
        return allocation

    def _start(self, row: Request, step: StepBuilder, *, alone: bool = False) -> bool:
        """Admit a waiting row if its blocks are there. With nobody else running it always gets them."""
        kv = self.kv
        while True:
            computed_blocks = [] if kv.has_table(row) else kv.get_computed_blocks(row)
            num_computed_tokens = row.num_computed_tokens or len(computed_blocks) * kv.block_size
            num_tokens = min(row.num_tokens - num_computed_tokens, step.budget)
            undisturbed = alone or not self._running
            wanted_tokens = num_computed_tokens + num_tokens if undisturbed else row.num_tokens
            spare = 0 if undisturbed else step.reserved_blocks + self._headroom()
            needed = kv.num_blocks_to_start(row, computed_blocks, wanted_tokens)
            if needed + spare <= kv.pool.num_free:
                break
            fork = self._last_fork()
            if self._running or fork is None:
                return False
            self._drop_fork(fork)
        self._unqueue(row)
        if not kv.has_table(row):
            kv.start(row, computed_blocks)
        self._enter(row, num_tokens, step)
        return True

    def _headroom(self) -> int:
        """Blocks to keep free beside a newcomer: one per running row, so that those do not preempt it at once.

        On a mixed simulated workload this makes 19 preemptions of 49, at the same throughput.
        """
        return max(self.limits.watermark_blocks, len(self._running))

    def _enter(self, row: Request, num_tokens: int, step: StepBuilder) -> None:
        allocation = self.kv.allocate_slots(row, num_tokens)
        assert allocation is not None, "blocks were counted before"
        self._running.add(row)
        row.state = RowState.RUNNING
        if row.first_scheduled_s is None:
            row.first_scheduled_s = self._clock()
            row.num_cached_tokens = min(row.num_computed_tokens, row.num_prompt_tokens)
        step.admit(row, num_tokens, allocation, self.kv.block_ids(row))
        step.reserved_blocks += self.kv.blocks_for(row.num_tokens) - self.kv.num_table_blocks(row)

    # -- taking blocks back --------------------------------------------------------------------------------------

    def _preempt(self, row: Request, step: StepBuilder | None = None) -> None:
        """Back to the queue with nothing computed; what it generated is kept and counts as known tokens.

        So does the token that a step in flight samples for it: that step still has the blocks.
        """
        if step is not None:
            step.withdraw(row)
        self.kv.free(row)
        self._leave_batch(row)
        self.num_preemptions += 1
        row.num_preemptions += 1
        self._queue(row)

    def _leave_batch(self, row: Request) -> None:
        self._running.remove(row)
        self._released.append(row.request_id)

    def _last_fork(self) -> Request | None:
        """Of the rows that hold blocks and are in no batch, the one that gives them up first."""
        return max(self._forks.values(), key=serving_key, default=None)

    def _drop_fork(self, row: Request) -> None:
        """Take its blocks; it will compute its tokens itself."""
        del self._forks[row.request_id]
        self._num_queued_tokens += row.num_computed_tokens if row.state is RowState.WAITING else 0
        self.kv.free(row)

    def _queue(self, row: Request) -> None:
        row.state = RowState.WAITING
        self._waiting.add(row)
        self._num_queued_tokens += row.num_due_tokens

    def _unqueue(self, row: Request) -> None:
        """Call before the row's table changes."""
        self._waiting.remove(row)
        self._forks.pop(row.request_id, None)
        self._num_queued_tokens -= row.num_due_tokens

    # -- update --------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Book a finished step: KV is there, tokens are appended, rows end or fail."""
        flight = self._flights.oldest(plan)
        broken = dict(result.failed)
        if len(result.token_ids) < len(plan.samples):
            for name in plan.samples - result.token_ids.keys() - broken.keys():
                broken[name] = "The step returned no token for this request."
        if broken:
            self._void(flight, broken)
        token_ids, logprobs, recalled, samples = result.token_ids, result.logprobs, flight.recalled, plan.samples
        rows, kv, held, running = self._rows, self.kv, self._held, RowState.RUNNING
        for name, num_tokens in plan.num_scheduled_tokens.items():
            row = rows.get(name)
            if row is None or name in recalled:
                continue
            if row.state is running:
                kv.commit(row, num_tokens)
                if held.num_held and not kv.being_written(row):
                    self._fork_choices(row)
            if row.aborted:
                self._finish(row, "abort")
            elif name in samples:
                self._take_token(row, token_ids[name], logprobs.get(name))
        self._flights.land(plan)

    def step_failed(self, plan: StepPlan, message: str) -> None:
        """The step raised as a whole. A row that ran alone is guilty; several become suspects and run one by one.

        A step that was launched behind it ran on what it left undone: its rows start over.
        """
        dropped = self._flights.drop_all()
        self._released = [*(name for flight in dropped for name in flight.plan.released), *self._released]
        rows = next(flight.rows(self._rows) for flight in dropped if flight.plan is plan)
        for row in self._rows.values():
            self._recall(row)
        if rows and len(plan.num_scheduled_tokens) == 1:  # not where the guilty one was recalled since
            self.kv.distrust(rows[0])
            self._fail(rows[0], message)
            if len(dropped) == 1:
                return
        for row in list(self._running):
            self._preempt(row)
        for row in [row for flight in dropped for row in flight.rows(self._rows)]:
            if row.aborted and row.state is not RowState.FINISHED:
                self._finish(row, "abort")
        self._suspects = [row for row in rows if row.state is not RowState.FINISHED]

    def abandon(self, plan: StepPlan | None, message: str) -> None:
        """`update` (or `schedule`: no plan) raised half-way: whatever it may have left half-booked fails.

        May raise in its turn, or leave `find_faults` something to find; then nothing here can be trusted any more.
        """
        if plan is not None:
            rows = (self._flights.land(plan) or Flight(plan)).rows(self._rows)
        else:
            starting = self._suspects[:1] or [*self._beams.ready()[:1], *list(self._waiting)[:1]]
            rows = [*self._running, *starting]
        for row in rows:
            if self.kv.has_table(row):
                self.kv.distrust(row)
            if self._outputs.has_end(row):
                self._leave(row)
            else:
                self._fail(row, message)

    def _void(self, flight: Flight, broken: dict[str, str]) -> None:
        """Fail broken rows; rows of steps in flight that read what those were writing start over."""
        failed = [row for row in flight.rows(self._rows) if row.request_id in broken]
        # Of a row that was preempted since, nobody can say any more what it was writing: then no reader is trusted.
        blind = any(row.state is not RowState.RUNNING for row in failed)
        untrusted: set[int] = set()
        for row in failed:
            untrusted |= self.kv.distrust(row)
        for reader in [reader for each in self._flights for reader in each.admitted_rows(self._rows)]:
            if reader in failed or reader.state is RowState.FINISHED:
                continue
            if reader.state is RowState.RUNNING and not blind and not self.kv.holds_any(reader, untrusted):
                continue
            untrusted |= self.kv.distrust(reader)
            self._recall(reader)
            if reader.aborted:
                self._finish(reader, "abort")
            elif reader.state is RowState.RUNNING:
                self._preempt(reader)
        for row in failed:
            self._fail(row, broken[row.request_id])

    def _recall(self, row: Request) -> None:
        """Nothing that steps in flight compute for the row counts."""
        self._flights.recall(row)
        if row.state is RowState.WAITING:
            self._num_queued_tokens -= row.num_pending_tokens
        row.num_pending_tokens = 0

    def _take_token(self, row: Request, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self._suspects and row in self._suspects:
            self._suspects.remove(row)
        if row.search is not None:
            if row.state is RowState.RUNNING:
                self._leave_batch(row)
            else:  # preempted since the step was launched
                self._unqueue(row)
            row.num_pending_tokens -= 1
            self._beams.take(row, row.search, logprobs)
            return
        row.token_ids.append(token_id)
        row.num_pending_tokens -= 1
        reason = finish_reason(row)
        self._outputs.token(row, token_id, logprobs, reason)
        if reason is not None:
            self._leave(row)

    def _fork_choices(self, leader: Request) -> None:
        for child in self._held.forkable(leader):
            self.kv.fork(leader, child, leader.num_prompt_tokens - 1)
            self._forks[child.request_id] = child
            self._queue(child)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _finish(self, row: Request, reason: FinishReason) -> None:
        self._outputs.end(row, reason)
        self._leave(row)

    def _fail(self, row: Request, message: str) -> None:
        self._outputs.failure(row, message)
        self._leave(row)

    def _leave(self, row: Request) -> None:
        """The only way out: every holding of the row is given back."""
        if row.state is RowState.FINISHED:  # with the other beams of its search
            return
        if row.state is RowState.RUNNING:
            self._leave_batch(row)
        elif row.state is RowState.HELD:
            self._held.drop(row)
        elif row in self._waiting:
            self._unqueue(row)
        self._forks.pop(row.request_id, None)
        if self.kv.has_table(row):
            self.kv.free(row)
        row.state = RowState.FINISHED
        self._recall(row)
        if row in self._suspects:
            self._suspects.remove(row)
        del self._rows[row.request_id]
        mine = self._clients[row.client_request_id]
        del mine[row.choice]
        if not mine:
            del self._clients[row.client_request_id]
        self._beams.left(row)
        successor = self._held.successor(row)
        if successor is not None:
            self._queue(successor)

    def swap_released(self, following: list[str]) -> list[str]:
        """For a plan made outside `schedule`: the rows it must release, and those that the next plan will."""
        released, self._released = self._released, following
        return released

    # -- what others see -----------------------------------------------------------------------------------------

    def take_outputs(self) -> list[TokensOut]:
        """Everything to tell clients since the call before."""
        return self._outputs.take()

    def find_faults(self) -> list[str]:
        """Contradictions between rows, queues and block tables, between steps; none in a sound scheduler. O(rows)."""
        counts = len(self._running), len(self._waiting), self._held.num_held, self._beams.num_reported()
        places = dict(zip(PLACES, counts, strict=True))
        num_choices = sum(len(choices) for choices in self._clients.values())
        queued_tokens = (sum(row.num_due_tokens for row in self._waiting), self._num_queued_tokens)
        return contradictions(self._rows, places, num_choices, self.kv.tables.keys(), queued_tokens)

    def load(self, step_ms: float = 0.0) -> EngineLoad:
        running = (*self._running, *self._beams.between_steps())
        counts = self.num_waiting, self._num_queued_tokens + self._held.num_held, self.num_preemptions
        return engine_load(self.kv.pool, running, *counts, step_ms)
