"""The scheduler: in every step it distributes one token budget over the requests.

There is one rule: a sequence's `num_computed_tokens` catches up with its tokens. Prefix hits, chunked prefill and
decode are that rule with different numbers. A step takes decodes first, then running and waiting prefills in the order
of the policy. When blocks run out, the newest sequence of the lowest priority is preempted: it loses its blocks and is
computed again later. The scheduler executes nothing (`loop.core` does) and knows no tensors (`runner` does).

Life of a sequence: `add` -> waiting -> `schedule` admits it -> `update` appends its tokens -> finished. Preemption
moves it back to waiting; `abort` ends it at any point.

The next step may be scheduled before the last one was read: tokens that a step in flight computes and samples count as
present, although their values are not known yet. `scheduler.in_flight_steps` decides which results of such a step are
dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from pagemill_engine.ipc.messages import TokensOut
from pagemill_engine.kv.manager import NOTHING_NEW, Allocation, KVCacheManager
from pagemill_engine.scheduler.admission import Admission
from pagemill_engine.scheduler.beam_searches import BeamSearches, clash, sequences_to_abort
from pagemill_engine.scheduler.builder import StepBuilder
from pagemill_engine.scheduler.choices import HeldChoices
from pagemill_engine.scheduler.consistency import QUEUED_STATES, inconsistencies
from pagemill_engine.scheduler.finish import finish_reason
from pagemill_engine.scheduler.in_flight_steps import InFlightStep, InFlightSteps, may_follow
from pagemill_engine.scheduler.limits import SchedulerLimits
from pagemill_engine.scheduler.load import engine_load
from pagemill_engine.scheduler.outputs import OutputQueue
from pagemill_engine.scheduler.policies import POLICIES
from pagemill_engine.scheduler.sequence import Sequence, SequenceState
from pagemill_engine.scheduler.sorted_sequences import SortedSequences, serving_key
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
        self._waiting = SortedSequences(self._rank)
        self._running = SortedSequences(serving_key)
        self._held = HeldChoices()
        self._sequences: dict[str, Sequence] = {}
        self._clients: dict[str, dict[int, Sequence]] = {}
        self._outputs = OutputQueue()
        self._step = 0
        self._in_flight = InFlightSteps()
        self._released: list[str] = []
        self._probing: list[Sequence] = []
        """Sequences of a step that failed as a whole. Each runs alone until it is cleared or blamed."""
        self._forks: dict[str, Sequence] = {}
        """Sequences that hold blocks but are in no batch: forks that wait to start, beams that wait for each other."""
        self._num_queued_tokens = 0
        """Tokens that waiting sequences have yet to compute."""
        self._beams = BeamSearches(
            self.kv, self._outputs, self._sequences, self._clients, self._forks, self._queue, self._leave
        )

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises `PagemillError` if it can never run or too many requests are waiting."""
        sequences = self._admission.admit(request, now_s=self._clock(), num_waiting=self.num_waiting)
        known = self._clients.get(request.request_id, {})
        if clash(sequences, known):
            raise invalid_field("request_id", f"Sequence {request.request_id[:80]} is already being served here.")
        mine = self._clients.setdefault(request.request_id, known)
        for (
            sequence
        ) in sequences:  # register all before any may leave: the last one to leave removes the client's entry
            mine[sequence.choice] = self._sequences[sequence.request_id] = sequence
        live = []
        for sequence in sequences:
            reason = finish_reason(sequence) if sequence.num_resumed_tokens else None
            if reason is None:
                live.append(sequence)
            else:
                self._finish(sequence, reason)
        if live:
            self._queue(live[0])
            for sequence in live[1:]:
                sequence.state = SequenceState.HELD
            self._held.hold(live[0], live[1:])

    def abort(self, client_request_id: str, choice: int | None = None) -> None:
        """Drop a client request or one of its choices, in any state. Unknown ids are ignored: they have ended."""
        sequences = self._clients.get(client_request_id, {})
        for sequence in sequences_to_abort(sequences.values(), choice, self._in_flight.includes):
            if self._in_flight.includes(sequence):
                sequence.aborted = True
            else:
                self._finish(sequence, "abort")

    def raise_allowance(self, client_request_id: str, allowance: int) -> None:
        """Let the rows of a client request generate up to `allowance` tokens each; unknown requests are ignored (they
        ended). A search keeps the length that it was planned with.
        """
        for row in self._clients.get(client_request_id, {}).values():
            if row.search is None:
                most = self._admission.max_total_tokens(row.num_prompt_tokens, row.sampling, allowance)
                row.max_total_tokens = max(row.max_total_tokens, most)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._beams.between_steps())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._held.num_held - self._beams.num_queued()

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or len(self._outputs) > 0

    # -- schedule ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan one step and open its KV writes. An empty plan means that nothing can run before a step in flight is
        read."""
        self._step += 1
        step = StepBuilder(StepPlan(self._step, {}), self.limits.max_num_batched_tokens)
        if self._probing:
            if not self._in_flight:
                self._schedule_alone(self._probing[0], step)
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
        """Count the step as run; its sampled tokens are pending from now on."""
        self.kv.launch(plan.num_scheduled_tokens)
        for name in plan.samples:
            self._sequences[name].num_pending_tokens += 1
        self._in_flight.launch(plan)

    def _schedule_decodes(self, step: StepBuilder) -> list[Sequence]:
        """Schedule all decodes. Returns the running sequences that are still in their prefill."""
        prefills = []
        overlaps, held, allocate_slots = len(self._in_flight) > 0, self._held, self.kv.allocate_slots
        # The hottest loop of the scheduler: attributes are looked up once and function calls avoided.
        running, scheduled, num_context_tokens = SequenceState.RUNNING, step.plan.num_scheduled_tokens, 0
        for sequence in list(self._running):
            if sequence.state is not running or (overlaps and not may_follow(sequence, held)):
                continue
            num_computed_tokens = sequence.num_computed_tokens
            if len(sequence.token_ids) + sequence.num_pending_tokens - num_computed_tokens > 1:
                prefills.append(sequence)
            elif step.budget > 0:
                allocation = allocate_slots(sequence, 1) or self._allocate(sequence, 1, step)
                if allocation is None:
                    continue
                if allocation is not NOTHING_NEW:
                    step.note_blocks(sequence, allocation)
                step.budget -= 1
                scheduled[sequence.request_id] = 1
                num_context_tokens += num_computed_tokens + 1
        step.finish_decodes(num_context_tokens)
        return [sequence for sequence in prefills if sequence.state is SequenceState.RUNNING]

    def _schedule_prefills(self, prefills: list[Sequence], step: StepBuilder, num_preemptions: int) -> None:
        """Schedule running and waiting prefills by rank, after the beams that only waited for each other: those decode.

        No sequence starts when the first one does not fit, nor after a preemption while anything runs or is in flight:
        a token whose value is unknown cannot be computed again. Blocks of running prefills are reserved, so that a
        start causes no preemption.
        """
        step.reserved_blocks = sum(
            self.kv.blocks_for(sequence.num_tokens) - self.kv.num_table_blocks(sequence) for sequence in prefills
        )
        running = deque(sorted(prefills, key=self._rank))
        beams = deque(self._beams.ready())
        fits = True
        while step.budget > 0:
            is_calm = self.num_preemptions == num_preemptions or not (self._running or self._in_flight)
            may_start = fits and is_calm and len(self._waiting) > 0 and len(self._running) < self.limits.max_num_seqs
            if may_start and beams:
                fits = self._start(beams.popleft(), step)
            elif may_start and (not running or self._rank(self._waiting.first()) < self._rank(running[0])):
                fits = self._start(self._waiting.first(), step)
            elif running:
                sequence = running.popleft()
                if (
                    sequence.state is SequenceState.RUNNING
                    and sequence.request_id not in step.plan.num_scheduled_tokens
                ):
                    self._continue(sequence, step)
            else:
                return

    def _schedule_alone(self, sequence: Sequence, step: StepBuilder) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._continue(sequence, step)
            return
        while not self._start(sequence, step, alone=True):
            self._preempt(self._running.last_except(None), step)

    def _continue(self, sequence: Sequence, step: StepBuilder) -> None:
        num_tokens = min(sequence.num_due_tokens, step.budget)
        allocation = self._allocate(sequence, num_tokens, step)
        if allocation is not None:
            step.place(sequence, num_tokens, allocation)
            step.reserved_blocks -= len(allocation.new_block_ids)

    def _allocate(self, sequence: Sequence, num_tokens: int, step: StepBuilder) -> Allocation | None:
        """Open the write, preempting others until it fits. Returns `None` if the sequence itself was preempted."""
        spared = sequence if self._probing else None
        while (allocation := self.kv.allocate_slots(sequence, num_tokens)) is None:
            victim, fork = self._running.last_except(spared), self._last_fork()
            if fork is not None and (victim is spared or serving_key(fork) > serving_key(victim)):
                self._drop_fork(fork)
                continue
            self._preempt(victim, step)
            if victim is sequence:
                return None
        return allocation

    def _start(self, sequence: Sequence, step: StepBuilder, *, alone: bool = False) -> bool:
        """Admit a waiting sequence if enough blocks are free. If no other sequence runs, they always are."""
        kv = self.kv
        while True:
            computed_blocks = [] if kv.has_table(sequence) else kv.get_computed_blocks(sequence)
            num_computed_tokens = sequence.num_computed_tokens or len(computed_blocks) * kv.block_size
            num_tokens = min(sequence.num_tokens - num_computed_tokens, step.budget)
            undisturbed = alone or not self._running
            wanted_tokens = num_computed_tokens + num_tokens if undisturbed else sequence.num_tokens
            spare = 0 if undisturbed else step.reserved_blocks + self._headroom()
            needed = kv.num_blocks_to_start(sequence, computed_blocks, wanted_tokens)
            if needed + spare <= kv.pool.num_free:
                break
            fork = self._last_fork()
            if self._running or fork is None:
                return False
            self._drop_fork(fork)
        self._unqueue(sequence)
        if not kv.has_table(sequence):
            kv.start(sequence, computed_blocks)
        self._enter(sequence, num_tokens, step)
        return True

    def _headroom(self) -> int:
        """Blocks to keep free when a sequence starts: one per running sequence, so that these do not preempt it at
        once.

        On a mixed simulated workload this reduces 49 preemptions to 19, at the same throughput.
        """
        return max(self.limits.watermark_blocks, len(self._running))

    def _enter(self, sequence: Sequence, num_tokens: int, step: StepBuilder) -> None:
        allocation = self.kv.allocate_slots(sequence, num_tokens)
        assert allocation is not None, "blocks were counted before"
        self._running.add(sequence)
        sequence.state = SequenceState.RUNNING
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = self._clock()
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        step.admit(sequence, num_tokens, allocation, self.kv.block_ids(sequence))
        step.reserved_blocks += self.kv.blocks_for(sequence.num_tokens) - self.kv.num_table_blocks(sequence)

    # -- taking blocks back --------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence, step: StepBuilder | None = None) -> None:
        """Return the sequence to the queue with nothing computed. Its generated tokens are kept as known tokens.

        So is the token that a step in flight samples for it: that step still uses the blocks.
        """
        if step is not None:
            step.withdraw(sequence)
        self.kv.free(sequence)
        self._leave_batch(sequence)
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._queue(sequence)

    def _leave_batch(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._released.append(sequence.request_id)

    def _last_fork(self) -> Sequence | None:
        """The sequence in `_forks` that gives up its blocks first."""
        return max(self._forks.values(), key=serving_key, default=None)

    def _drop_fork(self, sequence: Sequence) -> None:
        """Free its blocks; it will compute its tokens itself."""
        del self._forks[sequence.request_id]
        self._num_queued_tokens += sequence.num_computed_tokens if sequence.state is SequenceState.WAITING else 0
        self.kv.free(sequence)

    def _queue(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        self._waiting.add(sequence)
        self._num_queued_tokens += sequence.num_due_tokens

    def _unqueue(self, sequence: Sequence) -> None:
        """Call this before the sequence's block table changes."""
        self._waiting.remove(sequence)
        self._forks.pop(sequence.request_id, None)
        self._num_queued_tokens -= sequence.num_due_tokens

    # -- update --------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Apply a finished step: commit its KV writes, append its tokens, end or fail sequences."""
        in_flight = self._in_flight.oldest(plan)
        broken = dict(result.failed)
        if len(result.token_ids) < len(plan.samples):
            for name in plan.samples - result.token_ids.keys() - broken.keys():
                broken[name] = "The step returned no token for this request."
        if broken:
            self._void(in_flight, broken)
        token_ids, logprobs, discarded, samples = result.token_ids, result.logprobs, in_flight.discarded, plan.samples
        sequences, kv, held, running = self._sequences, self.kv, self._held, SequenceState.RUNNING
        for name, num_tokens in plan.num_scheduled_tokens.items():
            sequence = sequences.get(name)
            if sequence is None or name in discarded:
                continue
            if sequence.state is running:
                kv.commit(sequence, num_tokens)
                if held.num_held and not kv.being_written(sequence):
                    self._fork_choices(sequence)
            if sequence.aborted:
                self._finish(sequence, "abort")
            elif name in samples:
                self._take_token(sequence, token_ids[name], logprobs.get(name))
        self._in_flight.complete(plan)

    def step_failed(self, plan: StepPlan, message: str) -> None:
        """Handle a step that raised as a whole. A sequence that ran alone is blamed; several are probed one by one.

        A step that was launched behind the failed one read incomplete KV: its sequences start over.
        """
        dropped = self._in_flight.drop_all()
        self._released = [*(name for in_flight in dropped for name in in_flight.plan.released), *self._released]
        sequences = next(in_flight.sequences(self._sequences) for in_flight in dropped if in_flight.plan is plan)
        for sequence in self._sequences.values():
            self._discard(sequence)
        if sequences and len(plan.num_scheduled_tokens) == 1:  # unless the blamed one was discarded in between
            self.kv.invalidate(sequences[0])
            self._fail(sequences[0], message)
            if len(dropped) == 1:
                return
        for sequence in list(self._running):
            self._preempt(sequence)
        for sequence in [sequence for in_flight in dropped for sequence in in_flight.sequences(self._sequences)]:
            if sequence.aborted and sequence.state is not SequenceState.FINISHED:
                self._finish(sequence, "abort")
        self._probing = [sequence for sequence in sequences if sequence.state is not SequenceState.FINISHED]

    def abandon(self, plan: StepPlan | None, message: str) -> None:
        """Handle an `update` (or, without a plan, a `schedule`) that raised half-way: fail every sequence it may have
        left inconsistent.

        This may raise in turn, or leave inconsistencies for `find_inconsistencies`; then the scheduler cannot be
        trusted.
        """
        if plan is not None:
            sequences = (self._in_flight.complete(plan) or InFlightStep(plan)).sequences(self._sequences)
        else:
            starting = self._probing[:1] or [*self._beams.ready()[:1], *list(self._waiting)[:1]]
            sequences = [*self._running, *starting]
        for sequence in sequences:
            if self.kv.has_table(sequence):
                self.kv.invalidate(sequence)
            if self._outputs.has_end(sequence):
                self._leave(sequence)
            else:
                self._fail(sequence, message)

    def _void(self, in_flight: InFlightStep, broken: dict[str, str]) -> None:
        """Fail the broken sequences. Sequences of steps in flight that read blocks which those were writing start
        over."""
        failed = [sequence for sequence in in_flight.sequences(self._sequences) if sequence.request_id in broken]
        # What a sequence was writing is unknown if it was preempted since: then no reader is trusted.
        blind = any(sequence.state is not SequenceState.RUNNING for sequence in failed)
        untrusted: set[int] = set()
        for sequence in failed:
            untrusted |= self.kv.invalidate(sequence)
        for reader in [reader for each in self._in_flight for reader in each.admitted_sequences(self._sequences)]:
            if reader in failed or reader.state is SequenceState.FINISHED:
                continue
            if reader.state is SequenceState.RUNNING and not blind and not self.kv.holds_any(reader, untrusted):
                continue
            untrusted |= self.kv.invalidate(reader)
            self._discard(reader)
            if reader.aborted:
                self._finish(reader, "abort")
            elif reader.state is SequenceState.RUNNING:
                self._preempt(reader)
        for sequence in failed:
            self._fail(sequence, broken[sequence.request_id])

    def _discard(self, sequence: Sequence) -> None:
        """Drop everything that steps in flight compute for the sequence."""
        self._in_flight.discard(sequence)
        if sequence.state is SequenceState.WAITING:
            self._num_queued_tokens -= sequence.num_pending_tokens
        sequence.num_pending_tokens = 0

    def _take_token(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self._probing and sequence in self._probing:
            self._probing.remove(sequence)
        if sequence.search is not None:
            if sequence.state is SequenceState.RUNNING:
                self._leave_batch(sequence)
            else:  # preempted since the step was launched
                self._unqueue(sequence)
            sequence.num_pending_tokens -= 1
            self._beams.take(sequence, sequence.search, logprobs)
            return
        sequence.token_ids.append(token_id)
        sequence.num_pending_tokens -= 1
        reason = finish_reason(sequence)
        self._outputs.token(sequence, token_id, logprobs, reason)
        if reason is not None:
            self._leave(sequence)

    def _fork_choices(self, leader: Sequence) -> None:
        for child in self._held.forkable(leader):
            self.kv.fork(leader, child, leader.num_prompt_tokens - 1)
            self._forks[child.request_id] = child
            self._queue(child)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._outputs.end(sequence, reason)
        self._leave(sequence)

    def _fail(self, sequence: Sequence, message: str) -> None:
        self._outputs.failure(sequence, message)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """The only way out: release everything the sequence holds."""
        if sequence.state is SequenceState.FINISHED:  # with the other beams of its search
            return
        if sequence.state is SequenceState.RUNNING:
            self._leave_batch(sequence)
        elif sequence.state is SequenceState.HELD:
            self._held.drop(sequence)
        elif sequence in self._waiting:
            self._unqueue(sequence)
        self._forks.pop(sequence.request_id, None)
        if self.kv.has_table(sequence):
            self.kv.free(sequence)
        sequence.state = SequenceState.FINISHED
        self._discard(sequence)
        if sequence in self._probing:
            self._probing.remove(sequence)
        del self._sequences[sequence.request_id]
        mine = self._clients[sequence.client_request_id]
        del mine[sequence.choice]
        if not mine:
            del self._clients[sequence.client_request_id]
        self._beams.left(sequence)
        successor = self._held.successor(sequence)
        if successor is not None:
            self._queue(successor)

    def swap_released(self, following: list[str]) -> list[str]:
        """For a plan made outside `schedule`: returns the sequences it must release, and sets those of the next
        plan."""
        released, self._released = self._released, following
        return released

    # -- what others see -----------------------------------------------------------------------------------------

    def take_outputs(self) -> list[TokensOut]:
        """All outputs for clients since the last call."""
        return self._outputs.take()

    def find_inconsistencies(self) -> list[str]:
        """Contradictions between sequences, queues and block tables between two steps; empty in a consistent scheduler.
        O(sequences)."""
        counts = len(self._running), len(self._waiting), self._held.num_held, self._beams.num_reported()
        places = dict(zip(QUEUED_STATES, counts, strict=True))
        num_choices = sum(len(choices) for choices in self._clients.values())
        queued_tokens = (sum(sequence.num_due_tokens for sequence in self._waiting), self._num_queued_tokens)
        return inconsistencies(self._sequences, places, num_choices, self.kv.tables.keys(), queued_tokens)

    def load(self, step_ms: float = 0.0) -> EngineLoad:
        running = (*self._running, *self._beams.between_steps())
        counts = self.num_waiting, self._num_queued_tokens + self._held.num_held, self.num_preemptions
        return engine_load(self.kv.pool, running, *counts, step_ms)
