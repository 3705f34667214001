"""The scheduler: in every step it distributes one token budget over the requests.

There is one rule: a sequence's `num_computed_tokens` catches up with its tokens. Prefix hits, chunked prefill and
decode are that rule with different numbers. A step takes decodes first, then running and waiting prefills in the order
of the policy. When blocks run out, the newest sequence of the lowest priority is preempted: it loses its blocks and is
computed again later. The scheduler executes nothing (`loop.core` does) and uses no tensors (`executing` does).

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
from typing import TYPE_CHECKING

from pagemill_engine.ipc.messages import TokensOut
from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.kv.tables import NO_MATCH, NO_NEW_BLOCKS, Allocation
from pagemill_engine.limits import SchedulerLimits
from pagemill_engine.scheduler.admission import Admission, already_served
from pagemill_engine.scheduler.beam_searches import BeamSearches, clash, sequences_to_abort
from pagemill_engine.scheduler.builder import StepBuilder, note_changes, prompt_targets, reusable_tokens
from pagemill_engine.scheduler.finish import finish_reason
from pagemill_engine.scheduler.in_flight_steps import InFlightStep, can_run_ahead, turn_of
from pagemill_engine.scheduler.order import POLICIES
from pagemill_engine.scheduler.order.sorted_sequences import (
    LOW_PRIORITY_SERVING,
    LOW_PRIORITY_WAITING,
    low_priority_last,
    serving_key,
)
from pagemill_engine.scheduler.proposals import Proposals, may_propose
from pagemill_engine.scheduler.recovery import StepRecovery
from pagemill_engine.scheduler.reporting.reports import QUEUED_STATES, engine_load, inconsistencies
from pagemill_engine.scheduler.sequence import Sequence, SequenceState
from pagemill_engine.scheduler.sequences import Sequences
from pagemill_engine.scheduler.token_masks import advance, begin_masks, take_forced
from pagemill_execution.step import StepPlan, StepResult, TokenLogprobs
from pagemill_protocol.report.state import EngineLoad
from pagemill_protocol.request.generate import GenerateRequest

if TYPE_CHECKING:
    from pagemill_engine.grammar.token_state import TokenStates

Clock = Callable[[], float]
Logprobs = list[TokenLogprobs]


class Scheduler:
    def __init__(
        self,
        limits: SchedulerLimits,
        clock: Clock = time.monotonic,
        proposals: Proposals | None = None,
        num_stages: int = 1,
    ) -> None:
        """`num_stages`: of the runner, each of which computes another step at the same time."""
        self.limits = limits
        self.kv = CacheManager(
            limits.blocks_of_kinds,
            limits.block_size,
            kinds=limits.kinds,
            max_step_tokens=limits.max_num_batched_tokens,
            enable_prefix_caching=limits.enable_prefix_caching,
            shares_memory=limits.shares_memory,
        )
        self._clock = clock
        self._admission = Admission(limits)
        self._rank = low_priority_last(POLICIES[limits.policy])
        self._sequences = sequences = Sequences(self.kv, self._rank, proposals.end if proposals else None)
        self._waiting, self._running, self._choices = sequences.waiting, sequences.running, sequences.choices
        self._in_flight = sequences.in_flight
        self._beams = BeamSearches(sequences)
        self._recovery = StepRecovery(sequences)
        self._proposals = proposals
        self._num_stages = num_stages
        self._step = 0

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest, grammar: TokenStates | None = None) -> None:
        """Queue a request, whose answers have the form of `grammar`, if given. Raises `PagemillError` if the request
        can never run or too many requests are waiting."""
        seqs = self._admission.admit(request, grammar, now_s=self._clock(), num_waiting=self.num_waiting)
        if clash(seqs, self._sequences.by_client.get(request.request_id, {})):
            raise already_served(request.request_id)
        for seq in seqs:  # register all before any may leave: the last one to leave removes the client's entry
            self._sequences.add(seq)
        if self._proposals is not None:
            self._proposals.expect(request.predicted_token_ids)
        live = []
        for seq in seqs:
            reason = finish_reason(seq) if seq.num_resumed_tokens else None
            if reason is None:
                live.append(seq)
            else:
                self._sequences.finish(seq, reason)
        if live:
            self._sequences.queue(live[0])
            for seq in live[1:]:
                seq.state = SequenceState.WAITING_FOR_FORK
            self._choices.add(live[0], live[1:])

    def check(self, request: GenerateRequest, num_more: int = 0) -> None:
        """Raise the `PagemillError` that `add` would raise. `num_more`: sequences that will be waiting before this
        request."""
        self._admission.check(request, self.num_waiting + num_more)

    def is_serving(self, client_request_id: str) -> bool:
        """Whether a request has sequences that have not ended."""
        return client_request_id in self._sequences.by_client

    def abort(self, client_request_id: str, choice: int | None = None) -> None:
        """Abort a client request or one of its choices, in any state. Ids of ended requests are ignored."""
        seqs = self._sequences.by_client.get(client_request_id, {})
        for seq in sequences_to_abort(seqs.values(), choice, self._in_flight.includes):
            if self._in_flight.includes(seq):
                seq.aborted = True
            else:
                self._sequences.finish(seq, "abort")

    def raise_allowance(self, client_request_id: str, allowance: int) -> None:
        """Let each sequence of a request generate up to `allowance` tokens. Ids of ended requests are ignored."""
        self._admission.raise_allowance(self._sequences.by_client.get(client_request_id, {}).values(), allowance)

    @property
    def num_preemptions(self) -> int:
        return self._sequences.num_preemptions

    def reset_preemptions(self) -> None:
        """Count preemptions from 0: those of the warm-up are no client's."""
        self._sequences.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._beams.between_steps())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._choices.num_waiting - self._beams.num_queued()

    @property
    def has_work(self) -> bool:
        return len(self._sequences) > 0 or len(self._sequences.outputs) > 0

    # -- schedule ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan one step and open its KV writes. An empty plan means that nothing can run before a step in flight is
        read."""
        self._step += 1
        step = StepBuilder(self._step, len(self.kv.kinds), self.limits.max_num_batched_tokens)
        if probing := self._sequences.probing:
            if not self._in_flight:
                self._schedule_alone(probing[0], step)
        else:
            proposals = self._proposals if self._proposals is not None and self._proposals.is_active else None
            runs_ahead = self._in_flight and self._num_stages == 1
            if proposals is not None and runs_ahead and proposals.keep_waiting(self._sequences):
                return step.plan
            self._sequences.preempt_low_priority(self.limits.max_num_seqs)
            preemptions, turn = self.num_preemptions, turn_of(self._running, self._in_flight, self._num_stages)
            if proposals is not None:
                self._schedule_proposals(proposals, turn, step)
            prefills = self._schedule_decodes(turn, step)
            self._schedule_prefills(prefills, step, preemptions)
            if proposals is not None:
                proposals.plan_drafts(step.plan, self._sequences)
        plan = step.plan
        if plan.num_scheduled_tokens:
            plan.released = self._sequences.swap_released([])
            self._launch(plan)
        return plan

    def _launch(self, plan: StepPlan) -> None:
        """Count the step as run; its sampled tokens are pending from now on."""
        if self._sequences.reporting:
            plan.prompt_targets = prompt_targets(plan, self._sequences.reporting)
        note_changes(plan, self.kv, self._running)
        self.kv.launch(plan.num_scheduled_tokens)
        for name in plan.samples:
            seq = self._sequences.by_id[name]
            seq.num_pending_tokens += 1
            if seq.token_mask is not None and name not in plan.token_masks:
                plan.token_masks[name] = seq.token_mask
        for name, proposed in plan.proposals.items():
            self._sequences.by_id[name].num_pending_tokens += len(proposed)
        if plan.token_masks:
            begin_masks([self._sequences.by_id[name] for name in plan.token_masks])
        self._in_flight.launch(plan)

    def _schedule_proposals(self, proposals: Proposals, turn: list[Sequence], step: StepBuilder) -> None:
        """Schedule the decodes for which tokens are proposed, as long as all others have budget and blocks."""
        left, num_running, one_block = step.budget - len(turn), len(self._running), [1] * len(self.kv.kinds)
        seqs = [seq for seq in turn if may_propose(seq) and not self._choices.fork_is_due(seq)]
        for seq, token_ids in proposals.choose(seqs, turn, self._sequences.num_queued_tokens):
            if left < 1 or not self.kv.has_room(one_block, step.reserved, num_running):
                return
            found = proposals.fitting(seq, token_ids, left)
            allocation = found and self.kv.allocate(seq, 1 + len(found.token_ids), len(found.token_ids))
            if found is not None and allocation is not None:
                step.verify(seq, found, allocation)
                left -= len(found.token_ids)

    def _schedule_decodes(self, turn: list[Sequence], step: StepBuilder) -> list[Sequence]:
        """Schedule the decodes of `turn`. Returns those of it that are still in their prefill."""
        prefills = []
        overlaps, held, allocate = len(self._in_flight) > 0, self._choices, self.kv.allocate
        # The hottest loop of the scheduler: attributes are looked up once and function calls avoided.
        running, scheduled, num_context_tokens = SequenceState.RUNNING, step.plan.num_scheduled_tokens, 0
        for seq in [seq for seq in turn if seq.request_id not in scheduled] if scheduled else turn:
            if seq.state is not running or (overlaps and not can_run_ahead(seq, held)):
                continue
            num_computed_tokens = seq.num_computed_tokens
            if len(seq.token_ids) + seq.num_pending_tokens - num_computed_tokens > 1:
                prefills.append(seq)
            elif step.budget > 0:
                allocation = allocate(seq, 1)
                if allocation is None:
                    allocation = self._allocate(seq, 1, step)
                    if allocation is None:
                        continue
                if allocation is not NO_NEW_BLOCKS:
                    step.note_blocks(seq, allocation)
                step.budget -= 1
                scheduled[seq.request_id] = 1
                num_context_tokens += num_computed_tokens + 1
        step.finish_decodes(num_context_tokens)
        return [seq for seq in prefills if seq.state is SequenceState.RUNNING]

    def _schedule_prefills(self, prefills: list[Sequence], step: StepBuilder, num_preemptions: int) -> None:
        """Schedule running and waiting prefills by rank, after the beams that only waited for each other: those decode.

        No sequence starts when the first one does not fit, nor after a preemption while anything runs or is in flight:
        a token whose value is unknown cannot be computed again. Blocks of running prefills are reserved, so that a
        start causes no preemption.
        """
        for seq in prefills:
            step.reserve(self.kv.needs_to_finish(seq))
        running = deque(sorted(prefills, key=self._rank))
        beams = deque(self._beams.ready())
        fits = True
        while step.budget > 0:
            is_calm = self.num_preemptions == num_preemptions or not (self._running or self._in_flight)
            may_start = fits and is_calm and len(self._waiting) > 0 and len(self._running) < self.limits.max_num_seqs
            if may_start and self._num_stages > 1:  # a step before its preemption may still be in flight
                may_start = not self._in_flight.includes(self._waiting.first())
            if may_start and beams:
                fits = self._start(beams.popleft(), step)
            elif may_start and (not running or self._rank(self._waiting.first()) < self._rank(running[0])):
                fits = self._start(self._waiting.first(), step)
            elif running:
                seq = running.popleft()
                if seq.state is SequenceState.RUNNING and seq.request_id not in step.plan.num_scheduled_tokens:
                    self._continue(seq, step)
            else:
                return

    def _schedule_alone(self, seq: Sequence, step: StepBuilder) -> None:
        if seq.state is SequenceState.RUNNING:
            self._continue(seq, step)
            return
        while not self._start(seq, step, alone=True):
            self._preempt(self._running.last_except(None), step)

    def _continue(self, seq: Sequence, step: StepBuilder) -> None:
        num_tokens = min(seq.num_due_tokens, step.budget)
        if self._in_flight and self._running.last_except(None) is seq and self.kv.fits_once_read(seq, num_tokens):
            return  # it would be preempted, start over, and come to the same point
        needs = self.kv.needs_to_finish(seq)
        allocation = self._allocate(seq, num_tokens, step)
        if allocation is None:
            return
        if seq.was_jumped:
            step.admit(seq, num_tokens, allocation, self.kv.held_blocks(seq))
        else:
            step.place(seq, num_tokens, allocation)
        step.reserve(needs, -1)
        step.reserve(self.kv.needs_to_finish(seq))

    def _allocate(self, seq: Sequence, num_tokens: int, step: StepBuilder) -> Allocation | None:
        """Open the sequence's KV write, preempting others until it fits. Returns None if it was itself preempted, or
        waits for a state."""
        spared = seq if self._sequences.probing else None
        while (allocation := self.kv.allocate(seq, num_tokens)) is None:
            if (self._in_flight or step.plan.num_scheduled_tokens) and self.kv.lacks_state(seq, num_tokens):
                return None
            victim, fork = self._running.last_except(spared), self._sequences.last_fork()
            if fork is not None and (victim is spared or serving_key(fork) > serving_key(victim)):
                self._sequences.drop_fork(fork)
                continue
            self._preempt(victim, step)
            if victim is seq:
                return None
        return allocation

    def _start(self, seq: Sequence, step: StepBuilder, *, alone: bool = False) -> bool:
        """Admit a waiting sequence if enough blocks are free; if no other sequence runs, they are. Returns whether it
        started."""
        kv = self.kv
        while True:
            match = NO_MATCH if kv.has_table(seq) else kv.match(seq, reusable_tokens(seq))
            if match.grows_soon and not alone:
                return False
            num_computed_tokens = seq.num_computed_tokens or match.num_tokens
            num_tokens = min(seq.num_tokens - num_computed_tokens, step.budget)
            if self.limits.whole_prompts and num_tokens < seq.num_tokens:
                return False
            undisturbed = alone or not self._running
            wanted_tokens = num_computed_tokens + num_tokens if undisturbed else seq.num_tokens
            needs = kv.needs_to_start(seq, match, wanted_tokens)
            if kv.has_room(needs, step.reserved, None if undisturbed else len(self._running)):
                break
            fork = self._sequences.last_fork()
            if self._running or fork is None:
                return False
            self._sequences.drop_fork(fork)
        self._sequences.unqueue(seq)
        if not kv.has_table(seq):
            kv.start(seq, match, seq.reuse_points)
        self._enter(seq, num_tokens, step)
        return True

    def _enter(self, seq: Sequence, num_tokens: int, step: StepBuilder) -> None:
        allocation = self.kv.allocate(seq, num_tokens)
        assert allocation is not None, "blocks were counted before"
        self._running.add(seq)
        seq.state = SequenceState.RUNNING
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = self._clock()
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
        step.admit(seq, num_tokens, allocation, self.kv.held_blocks(seq))
        step.reserve(self.kv.needs_to_finish(seq))

    def _preempt(self, seq: Sequence, step: StepBuilder | None = None) -> None:
        if step is not None:
            step.withdraw(seq)
        self._sequences.preempt(seq)

    # -- update --------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Apply a finished step: commit its KV writes, append its tokens, end or fail sequences."""
        in_flight = self._in_flight.oldest(plan)
        broken = dict(result.failed)
        if len(result.token_ids) < len(plan.samples):
            for name in plan.samples - result.token_ids.keys() - result.pooled.keys() - broken.keys():
                broken[name] = "The step returned no token for this request."
        if broken:
            self._recovery.fail_broken(in_flight, broken)
        token_ids, logprobs, discarded, samples = result.token_ids, result.logprobs, in_flight.discarded, plan.samples
        seqs, kv, held, running = self._sequences.by_id, self.kv, self._choices, SequenceState.RUNNING
        targets, proposals, commit, take_token = plan.prompt_targets, plan.proposals, kv.commit, self._take_token
        # This loop runs as often as that of `_schedule_decodes`.
        for name, num_tokens in plan.num_scheduled_tokens.items():
            seq = seqs.get(name)
            if seq is None or (discarded and name in discarded):
                continue
            if proposals and name in proposals:
                self._take_verified(seq, num_tokens, len(proposals[name]), token_ids[name], logprobs.get(name))
                continue
            if seq.state is running:
                if held.num_waiting:
                    # Choices resume one token earlier, where a window may still show a block that this token passes.
                    commit(seq, num_tokens, drops=False)
                    if not kv.being_written(seq):
                        self._sequences.fork_choices(seq)
                    kv.drop_behind(seq)
                else:
                    commit(seq, num_tokens)
            if targets and name in targets and seq.prompt_report is not None:
                seq.prompt_report.add(targets[name], result.prompt_logprobs[name])
            if seq.aborted:
                self._sequences.finish(seq, "abort")
            elif seq.pooling is not None:
                if name in samples:
                    self._take_pooled(seq, result.pooled[name])
            elif name in samples:
                take_token(seq, token_ids[name], logprobs[name][0] if logprobs and name in logprobs else None)
        if result.drafted and self._proposals is not None:
            self._proposals.take_drafts(result, seqs)
        self._in_flight.complete(plan)

    def _take_verified(
        self, seq: Sequence, num_tokens: int, num_proposed: int, token_ids: list[int], logprobs: Logprobs | None
    ) -> None:
        """Apply the result of a sequence with proposed tokens: `token_ids` were sampled, of which all but the last were
        proposed. They are taken one by one, as if each had been sampled in a step of its own."""
        if seq.state is not SequenceState.RUNNING:  # preempted since: it computes all again behind the first token
            self._sequences.withdraw_pending(seq, num_proposed)
            if seq.aborted:
                self._sequences.finish(seq, "abort")
            else:
                self._take_token(seq, token_ids[:1], None if logprobs is None else logprobs[0])
            return
        num_rejected = 1 + num_proposed - len(token_ids)
        self._sequences.withdraw_pending(seq, num_rejected)
        self.kv.withdraw(seq, num_rejected)
        self.kv.commit(seq, num_tokens - num_proposed)
        if seq.aborted:
            self._sequences.finish(seq, "abort")
            return
        num_accepted, num_outputs = len(token_ids) - 1, len(self._sequences.outputs)
        if self._proposals is not None:
            self._proposals.count(seq, num_accepted)
        for place, token_id in enumerate(token_ids):
            if place:
                self.kv.commit(seq, 1)
            self._take_token(seq, [token_id], None if logprobs is None else logprobs[place])
            if not self.kv.has_table(seq):  # it has ended
                break
        self._sequences.outputs.verified(num_outputs, num_proposed, num_accepted)

    def step_failed(self, plan: StepPlan, message: str) -> None:
        """Handle a step that raised as a whole (`recovery`)."""
        self._recovery.step_failed(plan, message)

    def abandon(self, plan: StepPlan | None, message: str) -> None:
        """Handle an `update` (or, without a plan, a `schedule`) that raised half-way.

        Fails every sequence that may be inconsistent. This may raise in turn, or leave inconsistencies for
        `find_inconsistencies`; then the scheduler cannot be trusted.
        """
        if plan is not None:
            affected = (self._in_flight.complete(plan) or InFlightStep(plan)).sequences(self._sequences.by_id)
        else:
            starting = self._sequences.probing[:1] or [*self._beams.ready()[:1], *list(self._waiting)[:1]]
            affected = [*self._running, *starting]
        self._recovery.abandon(affected, message)

    def _take_token(self, seq: Sequence, taken: list[int], logprobs: TokenLogprobs | None) -> None:
        """Take a sampled token. `taken`: a list of the token alone, which the output shares with the step's result: a
        further list for each row makes the garbage collector run more often, which takes a tenth of a step."""
        if self._sequences.probing:
            self._sequences.clear(seq)
        if seq.search is not None:
            if seq.state is SequenceState.RUNNING:
                self._sequences.leave_batch(seq)
            else:  # preempted since the step was launched
                self._sequences.unqueue(seq)
            seq.num_pending_tokens -= 1
            self._beams.take(seq, seq.search, logprobs)
            return
        seq.token_ids += taken
        seq.num_pending_tokens -= 1
        if seq.needs_last_token:
            num_tokens = len(seq.token_ids)
            if fault := advance(seq) or self._jump(seq):
                self._sequences.fail(seq, f"The answer was cut off: {fault}.")
                return
            taken = [*taken, *seq.token_ids[num_tokens:]]  # the result keeps its own
        reason = finish_reason(seq)
        self._sequences.outputs.tokens(seq, taken, logprobs, reason)
        if reason is not None:
            self._sequences.free(seq)

    def _take_pooled(self, seq: Sequence, vector: bytes) -> None:
        if self._sequences.probing:
            self._sequences.clear(seq)
        seq.num_pending_tokens -= 1
        self._sequences.outputs.pooled(seq, vector)
        self._sequences.free(seq)

    def _jump(self, seq: Sequence) -> str:
        """Append the tokens that the form leaves no choice about; the next step computes them together. Returns the
        fault that ends the sequence, or "". Does nothing where log probabilities of each token are reported."""
        if not self.limits.most_jumped or seq.sampling.num_alternatives is not None:
            return ""
        if seq.state is not SequenceState.RUNNING or self._sequences.probing or self._choices.fork_is_due(seq):
            return ""
        if seq.num_pending_tokens:  # sampled in the same step
            return ""
        num_tokens = len(seq.token_ids)
        fault = take_forced(seq, self.limits.most_jumped)
        seq.was_jumped = len(seq.token_ids) > num_tokens
        return fault

    def swap_released(self, following: list[str]) -> list[str]:
        """Return the sequences that a plan made outside `schedule` must release, and set those of the next plan."""
        return self._sequences.swap_released(following)

    # -- reports -------------------------------------------------------------------------------------------------

    def take_outputs(self) -> list[TokensOut]:
        """Return all outputs for clients since the last call."""
        return self._sequences.outputs.take()

    def find_inconsistencies(self) -> list[str]:
        """Return the contradictions between sequences, queues and block tables; empty if consistent. Call this between
        two steps. O(sequences)."""
        counts = len(self._running), len(self._waiting), self._choices.num_waiting, self._beams.num_reported()
        places = dict(zip(QUEUED_STATES, counts, strict=True))
        num_choices = sum(len(choices) for choices in self._sequences.by_client.values())
        queued_tokens = (sum(seq.num_due_tokens for seq in self._waiting), self._sequences.num_queued_tokens)
        return inconsistencies(self._sequences.by_id, places, num_choices, self.kv.tables.keys(), queued_tokens)

    def load(self, step_ms: float = 0.0) -> EngineLoad:
        running = (*self._running, *self._beams.between_steps())
        counts = self.num_waiting, self._sequences.num_queued_tokens + self._choices.num_waiting, self.num_preemptions
        num_low_priority = self._running.num_from(LOW_PRIORITY_SERVING) + self._waiting.num_from(LOW_PRIORITY_WAITING)
        return engine_load(self.kv.usage(), running, *counts, num_low_priority, step_ms)
