"""One engine in fast-forward: the decisions of `pagemill_engine.scheduler`, made only where they could change.

A step that computes prompt tokens, or at which a request may start, is decided as the scheduler decides it, on counters
instead of tokens and blocks. Between two such steps the same rows decode, and all steps up to the next end of a row,
arrival or shortage of blocks are one formula (`fast_steps`).

The pod works ahead of the clock only as far as the real loop, which launches a step before the previous one was read
(`pagemill_engine.loop.core`): an arrival takes part in the first step that is launched after it. So a pod is advanced
to an instant when it is asked or something arrives, and reports when it will next change.

Choices, beams, stop tokens and failures of a step are not simulated. The gateway's brain decides which pod gets a
request.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from heapq import heapify, heappop, heappush

import msgspec

from pagemill_engine.kv.kind_cache import watermark_blocks
from pagemill_engine.limits import SchedulerLimits
from pagemill_engine.scheduler.order import POLICIES
from pagemill_engine.scheduler.order.sorted_sequences import low_priority_last
from pagemill_protocol.report.state import EngineLoad
from pagemill_simulator.fleet.engines.fast_kinds import UNLIMITED, FurtherKinds, RowHolding
from pagemill_simulator.fleet.engines.fast_kv import KVCounts
from pagemill_simulator.fleet.engines.fast_sequence import FastSequence, SequencePhase
from pagemill_simulator.fleet.engines.fast_steps import OpenStep, StepRun, StepTimes


class FastPod:
    def __init__(self, limits: SchedulerLimits, steps: StepTimes, *, overlaps: bool = True) -> None:
        """`overlaps`: whether a step is launched before the previous one was read."""
        self.limits = limits
        num_blocks = limits.num_blocks if limits.kinds[0].keeps_all else UNLIMITED
        self.kv = KVCounts(num_blocks, limits.block_size, caches=limits.enable_prefix_caching)
        self.further = FurtherKinds(limits, self.kv)
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_sampled_tokens = 0
        """Tokens sampled by all launched steps."""
        self._num_latest_tokens = self._num_tokens_before = 0
        """Tokens sampled by the latest step, and by the one before it."""
        self.busy_s = 0.0
        self.ended: deque[FastSequence] = deque()
        """Rows whose last step was launched, in the order of its end; the reader removes them."""
        self._steps = steps
        self._overlaps = overlaps
        self._rank = low_priority_last(POLICIES[limits.policy])
        self._budget = limits.max_num_batched_tokens
        self._num_arrivals = 0
        self._launch_s = 0.0
        """Launch time of the next step: the step before the latest one was read then."""
        self._started: list[FastSequence] = []
        """Rows whose first token's step was launched; the reader removes them."""
        self._end_s: float | None = None
        """End of the step in flight; None: there is none."""
        self._waiting: list[tuple[tuple[int, ...], FastSequence]] = []
        """A heap."""
        self._num_waiting_tokens = 0
        self._prefilling: list[tuple[tuple[int, ...], FastSequence]] = []
        """Sorted by rank."""
        self._decoding: list[tuple[int, int, FastSequence]] = []
        """A heap by the step after the row's last one, then by arrival."""
        self._num_decode_tokens = 0
        """Number of tokens that decoding rows have computed."""
        self._leaving: deque[FastSequence] = deque()
        self._unreported: list[FastSequence] = []
        """Decoding rows whose next step samples their first token."""
        self._is_stuck = False
        """Whether no waiting request can start before a row ends."""
        self._last_report: EngineLoad | None = None
        """None: nothing was decided since."""
        self._known_run: tuple[StepRun, int] | None = None
        """None: a step was launched, or blocks were freed, since it was computed."""
        self._is_starting = False
        self._num_new = self._num_new_tokens = self._num_new_low_priority = 0
        """Requests, prompt tokens, and low-priority requests that arrived since the last launch of a step."""
        self._num_low_priority = 0
        """Number of low-priority rows, in any place."""

    # -- arrivals -------------------------------------------------------------------------------------------------

    def add(self, row: FastSequence, now_s: float) -> None:
        """Add a row that arrives; the pod must have been advanced to `now_s` before."""
        if not self.has_work:
            self._launch_s = max(self._launch_s, now_s)
        self._num_arrivals += 1
        row.arrival = self._num_arrivals
        row.num_tokens, row.num_left = row.num_prompt_tokens, row.num_output_tokens
        row.owner = row.session
        self._num_new, self._num_new_tokens = self._num_new + 1, self._num_new_tokens + row.num_tokens
        self._num_low_priority += row.is_low_priority
        self._num_new_low_priority += row.is_low_priority
        self._queue(row)

    @property
    def has_work(self) -> bool:
        return bool(self._decoding or self._prefilling or self._waiting or self._leaving) or self._end_s is not None

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling) + len(self._leaving)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def load(self) -> EngineLoad:
        """Return the load as `report` does: after the step that was read last, before another one was launched."""
        report = self.report()
        if report.num_preemptions == self.num_preemptions:
            return report
        return msgspec.structs.replace(report, num_preemptions=self.num_preemptions)

    def report(self) -> EngineLoad:
        """Return the requests, tokens and blocks that were reported last."""
        return self._last_report or self._present()

    def _present(self) -> EngineLoad:
        """Return the present load, without what arrived since the last launch of a step."""
        num_tokens, num_tokens_prefilling = self._num_decode_tokens, 0
        for _, row in self._prefilling:
            num_tokens += row.num_computed_tokens
            num_tokens_prefilling += row.num_due_tokens
        for row in self._leaving:
            num_tokens += row.num_computed_tokens
        kinds = self.further.load()
        return EngineLoad(
            num_kv_bytes_total=sum(each.total for each in kinds),
            num_kv_bytes_active=sum(each.active for each in kinds),
            kind_bytes=kinds if len(kinds) > 1 else [],
            num_requests_running=self.num_running,
            num_requests_waiting=len(self._waiting) - self._num_new,
            num_tokens_running=num_tokens,
            num_tokens_waiting=self._num_waiting_tokens + num_tokens_prefilling - self._num_new_tokens,
            num_low_priority_requests=self._num_low_priority - self._num_new_low_priority,
            num_preemptions=self.num_preemptions,
        )

    def num_read_tokens(self, now_s: float) -> int:
        """Return the tokens sampled by steps that were read by then; the pod must have been advanced to it."""
        if self._end_s is None:
            return self.num_sampled_tokens - (self._num_latest_tokens if self._launch_s > now_s else 0)
        num_unread = self._num_latest_tokens if self._end_s > now_s else 0
        num_unread += self._num_tokens_before if self._launch_s > now_s else 0
        return self.num_sampled_tokens - num_unread

    def take_started(self) -> list[FastSequence]:
        """Return the rows whose first token is sampled by a step that was launched since the last call."""
        started = self._started
        if started:
            self._started = []
        return started

    @property
    def is_starting(self) -> bool:
        """Whether the pod was idle before and no step was read since."""
        return self._is_starting

    @property
    def has_more_to_report(self) -> bool:
        """Whether the next report will differ from this one without arrivals, sometimes only in the free blocks."""
        is_tight = 2 * self.kv.num_active > self.limits.num_blocks
        return self.has_work and (self._last_report is not None or is_tight)

    def cut(self, now_s: float) -> list[tuple[FastSequence, int]]:
        """Return all unfinished rows of a pod that is gone at `now_s`, with the number of their generated tokens."""
        found = [row for _, row in self._waiting] + [row for _, row in self._prefilling]
        for _, _, row in self._decoding:
            self._settle(row)
            found.append(row)
        found += [row for row in self.ended if row.end_s > now_s]
        num_unread = (self._launch_s > now_s) + (self._end_s is not None and self._end_s > now_s)
        return [(row, _num_made(row, num_unread, now_s)) for row in sorted(found, key=lambda row: row.arrival)]

    # -- time -----------------------------------------------------------------------------------------------------

    def advance(self, until_s: float) -> None:
        """Launch all steps whose launch is before `until_s`."""
        while self._launch_s < until_s:
            self._release(self._launch_s)
            if self._decodes_only() and self._skip_steps(until_s):
                self._last_report, self._is_starting = None, False
            elif not self.has_work:
                break
            else:
                # What arrived while the step ran was not there when its report was made.
                self._last_report = None
                self._last_report = self.report()
                self._is_starting = self._end_s is None and self._overlaps
                self._num_new = self._num_new_tokens = self._num_new_low_priority = 0
                self._iterate()
        self._release(until_s)

    def next_news_s(self) -> float:
        """Return when the pod next changes without arrivals; infinity if never.

        That is when the next row ends, the next step must be decided, or the first step after a pause is read.
        """
        if self.ended:
            return self.ended[0].end_s
        if not self.has_work:
            return math.inf
        if self._is_starting:
            return self._launch_s
        if not self._decodes_only():
            return self._first_result_s()
        run, num_steps = self._run()
        return run.end_s(num_steps) if num_steps else self._launch_s

    def _first_result_s(self) -> float:
        """Return a time by which no step is launched that ends a row or a prompt, the launch of the next one or later.

        The first prompt uses the whole budget of each step until it is computed, and nothing else starts.
        """
        if not self._prefilling or self._end_s is None or not self._overlaps:
            return self._launch_s
        rank, first = self._prefilling[0]
        num_steps = -(-first.num_due_tokens // self._budget)
        if self._decoding:
            num_steps = min(num_steps, self._decoding[0][0] - self.num_steps)
        if num_steps < 2 or (self._waiting and self._waiting[0][0] < rank):
            return self._launch_s
        kv = self.kv
        if kv.blocks_for(first.num_due_tokens) + 1 + num_steps * len(self._decoding) > self.further.num_free():
            return self._launch_s
        return self._end_s + (num_steps - 2) * self._steps.base_s[self._budget]

    def _decodes_only(self) -> bool:
        """Whether the next steps only decode the same rows."""
        if self._prefilling or not self._decoding or (self._overlaps and self._end_s is None):
            return False
        return not self._waiting or (self._is_stuck and not self._leaving)

    def _run(self) -> tuple[StepRun, int]:
        """Return the run of steps that decode just these rows, and its length."""
        if self._known_run is not None:
            return self._known_run
        num_rows = len(self._decoding)
        begin_s = self._launch_s if self._end_s is None else self._end_s
        run = self._steps.run_of(num_rows, self._num_decode_tokens + num_rows, begin_s)
        left = self._decoding[0][0] - self.num_steps
        num_free = self.further.num_free()
        self._known_run = run, self.kv.steps_until_full(self.num_steps, num_rows, left, num_free)
        return self._known_run

    def _skip_steps(self, until_s: float) -> bool:
        """Launch the steps of the run that are launched in time; return False if the next one lacks blocks."""
        run, most = self._run()
        if not most:
            return False
        num_steps = 1
        if not self._overlaps:
            num_steps += run.num_ended_before(until_s, most - 1)
        elif most > 1 and run.begin_s < until_s:
            # Each is launched when the step before the previous one ends: the second when the one in flight does.
            num_steps += 1 + run.num_ended_before(until_s, most - 2)
        if self._unreported:
            self._report_first_token(run.end_s(1))
        kv, num_rows = self.kv, len(self._decoding)
        kv.take(kv.needed_by(self.num_steps, num_steps, num_rows))
        end_s = run.end_s(num_steps)
        self._launch_s, self._end_s = (run.end_s(num_steps - 1), end_s) if self._overlaps else (end_s, None)
        self._stepped(num_steps, run.begin_s, end_s)
        self._count_further()
        return True

    def _iterate(self) -> None:
        """Run one iteration of the loop: launch a step, with overlap another one behind it, and read the first."""
        if self._end_s is None:
            self._end_s = self._launch(self._launch_s)
            if self._end_s is None:
                if self._waiting:
                    raise RuntimeError("a fast pod has stopped: a request waits and nothing runs")
                return
        following = self._launch(self._end_s) if self._overlaps else None
        self._launch_s, self._end_s = self._end_s, following

    # -- one step -------------------------------------------------------------------------------------------------

    def _launch(self, begin_s: float) -> float | None:
        """Decide a step that begins at `begin_s`; return its end, or None if nothing can run before another is read."""
        self._count_further()
        if self._num_low_priority:
            self._preempt_low_priority()
        num_preemptions = self.num_preemptions
        kv = self.kv
        while not self._has_blocks(kv.needed_at(self.num_steps)):
            self._preempt(self._newest())
        num_decodes = len(self._decoding)
        kv.take(kv.needed_at(self.num_steps))
        self.further.take(kv.needed_at(self.num_steps))
        step = OpenStep(self._budget - num_decodes, self._num_decode_tokens + num_decodes)
        self._schedule_prefills(step, num_preemptions)
        num_tokens = self._budget - step.budget
        if not num_tokens:
            return None
        end_s = begin_s + self._steps.step_s(num_tokens, step.num_context_tokens, step.products)
        if self._unreported:
            self._report_first_token(end_s)
        self._stepped(1, begin_s, end_s)
        for row, num_chunk_tokens in step.chunks:
            self._computed(row, num_chunk_tokens, end_s)
        return end_s

    def _schedule_prefills(self, step: OpenStep, num_preemptions: int) -> None:
        """See `Scheduler._schedule_prefills`."""
        kv, limits = self.kv, self.limits
        step.num_reserved_blocks = sum(kv.blocks_for(row.num_tokens) - row.num_blocks for _, row in self._prefilling)
        if self.further:
            self.further.is_short = False
            rows = [row for _, row in self._prefilling]
            self.further.reserve((row.num_computed_tokens, row.num_tokens, self._held(row)) for row in rows)
        running = deque(self._prefilling)
        fits = True
        while True:
            has_seat = self.num_running < limits.max_num_seqs
            may_start = fits and has_seat and bool(self._waiting) and self.num_preemptions == num_preemptions
            if step.budget <= 0:
                self._is_stuck = False
                return
            if may_start and (not running or self._waiting[0][0] < running[0][0]):
                fits = self._start(self._waiting[0][1], step)
            elif running:
                row = running.popleft()[1]
                if row.phase is SequencePhase.PREFILLING:
                    self._continue(row, step)
            else:
                is_calm = self.num_preemptions == num_preemptions and not self.further.is_short
                self._is_stuck = is_calm and not self._preempts_next()
                return

    def _preempt_low_priority(self) -> None:
        """See `Sequences.preempt_low_priority`."""
        most = self.limits.max_num_seqs
        if self.num_running < most:
            return
        num_hurried = sum(1 for _, row in self._waiting if not row.is_low_priority)
        for _ in range(min(num_hurried, most)):
            last = self._newest()
            if not last.is_low_priority:
                return
            self._preempt(last)

    def _preempts_next(self) -> bool:
        """Whether the next step preempts a low-priority row: all sequence slots are taken and another request waits."""
        if not self._num_low_priority or not self._waiting or self.num_running < self.limits.max_num_seqs:
            return False
        return not self._waiting[0][1].is_low_priority and self._newest().is_low_priority

    def _start(self, row: FastSequence, step: OpenStep) -> bool:
        """See `Scheduler._start`."""
        kv = self.kv
        num_hits = 0
        if row.owner is not None:
            num_hits = min(kv.num_cached_of(row.owner), (row.num_tokens - 1) // kv.block_size)
            num_hits = self.further.hits(row.owner, num_hits) if self.further else num_hits
        num_cached_tokens = num_hits * kv.block_size
        num_tokens = min(row.num_tokens - num_cached_tokens, step.budget)
        num_running = self.num_running
        wanted_tokens = row.num_tokens if num_running else num_cached_tokens + num_tokens
        kept = max(watermark_blocks(self.limits.num_blocks), num_running)
        spare = step.num_reserved_blocks + kept if num_running else 0
        num_first = kv.blocks_for(wanted_tokens) + spare
        if self.further and not self.further.has_room(num_cached_tokens, wanted_tokens, num_running, num_first):
            return False
        if num_first > kv.num_free:
            return False
        heappop(self._waiting)
        self._num_waiting_tokens -= row.num_due_tokens
        if num_hits:
            assert row.owner is not None
            kv.revive(row.owner, num_hits)
        self.further.start(row.owner, num_hits)
        row.num_computed_tokens, row.num_blocks = num_cached_tokens, num_hits
        row.latest_step = row.num_unread_tokens = 0
        if not row.started:
            row.started, row.num_cached_tokens = True, num_cached_tokens
        row.phase = SequencePhase.PREFILLING
        insort(self._prefilling, (self._rank_of(row), row))
        self._place(row, num_tokens, step)
        step.num_reserved_blocks += kv.blocks_for(row.num_tokens) - row.num_blocks
        self._reserve(row)
        return True

    def _continue(self, row: FastSequence, step: OpenStep) -> None:
        """See `Scheduler._continue`: other rows are preempted until this one fits, or it is preempted itself."""
        kv = self.kv
        num_tokens = min(row.num_due_tokens, step.budget)
        num_new = kv.blocks_for(row.num_computed_tokens + num_tokens) - row.num_blocks
        while not self._has_blocks(num_new):
            victim = self._newest()
            if (
                victim is row
                and self._end_s is not None
                and self.further.passed(row.num_computed_tokens, self._held(row))
            ):
                return  # fits once the step in flight was read
            self._withdraw(victim, step)
            self._preempt(victim)
            if victim is row:
                return
        self._reserve(row, -1)
        self._place(row, num_tokens, step)
        step.num_reserved_blocks -= num_new
        self._reserve(row)

    def _place(self, row: FastSequence, num_tokens: int, step: OpenStep) -> None:
        num_blocks = self.kv.blocks_for(row.num_computed_tokens + num_tokens)
        self.kv.take(num_blocks - row.num_blocks)
        self.further.take(num_blocks - row.num_blocks)
        row.num_blocks = num_blocks
        step.chunks.append((row, num_tokens))
        step.count(row, num_tokens, 1)

    def _withdraw(self, victim: FastSequence, step: OpenStep) -> None:
        """Remove a preempted row's part from the step."""
        if victim.phase is SequencePhase.DECODING:
            num_computed_tokens = victim.num_computed_tokens + self.num_steps - victim.as_of_step
            step.budget += 1
            step.num_context_tokens -= num_computed_tokens + 1
            if num_computed_tokens % self.kv.block_size == 0:
                self.kv.take(-1)
                self.further.take(-1)
            return
        for row, num_tokens in step.chunks:
            if row is victim:
                step.count(row, num_tokens, -1)
        step.chunks = [each for each in step.chunks if each[0] is not victim]

    # -- results of a launched step -------------------------------------------------------------------------------

    def _stepped(self, num_steps: int, begin_s: float, end_s: float) -> None:
        """Advance all decoding rows by so many steps."""
        self._known_run = None
        self.busy_s += end_s - begin_s
        self.num_steps += num_steps
        num_rows = len(self._decoding)
        self._num_tokens_before = num_rows if num_steps > 1 else self._num_latest_tokens
        self._num_latest_tokens = num_rows
        self.num_sampled_tokens += num_steps * num_rows
        self._num_decode_tokens += num_steps * num_rows
        while self._decoding and self._decoding[0][0] == self.num_steps:
            row = heappop(self._decoding)[2]
            self._settle(row)
            self._leave(row, end_s)

    def _computed(self, row: FastSequence, num_tokens: int, end_s: float) -> None:
        row.num_computed_tokens += num_tokens
        row.num_unread_tokens, row.latest_step = num_tokens, self.num_steps
        if row.num_due_tokens == 0:
            self._started_at(row, end_s)
            row.num_tokens += 1
            row.num_left -= 1
            self.num_sampled_tokens += 1
            self._num_latest_tokens += 1
        if row.num_left and row.num_due_tokens > 1:
            return
        self._prefilling.remove((self._rank_of(row), row))
        if not row.num_left:
            self._leave(row, end_s)
            return
        row.phase, row.as_of_step = SequencePhase.DECODING, self.num_steps
        self._num_decode_tokens += row.num_computed_tokens
        self.kv.watch(self.num_steps, row.num_computed_tokens)
        heappush(self._decoding, (self.num_steps + row.num_left, row.arrival, row))
        if row.first_token_s == math.inf:
            self._unreported.append(row)

    def _report_first_token(self, end_s: float) -> None:
        for row in self._unreported:
            self._started_at(row, end_s)
        self._unreported.clear()

    def _started_at(self, row: FastSequence, end_s: float) -> None:
        if row.first_token_s == math.inf:
            row.first_token_s = end_s
            self._started.append(row)
            if row.session is not None:
                self.kv.hold(row.session, row.num_computed_tokens)

    def _leave(self, row: FastSequence, end_s: float) -> None:
        row.phase, row.end_s = SequencePhase.LEAVING, end_s
        self._leaving.append(row)
        self.ended.append(row)

    def _release(self, now_s: float) -> None:
        """Free what ended with a step that was read by now."""
        leaving = self._leaving
        if not leaving or leaving[0].end_s > now_s:
            return
        while leaving and leaving[0].end_s <= now_s:
            row = leaving.popleft()
            row.phase = SequencePhase.GONE
            self._num_low_priority -= row.is_low_priority
            self.kv.give_back(row.num_blocks, row.num_computed_tokens, row.session)
            self.further.release(RowHolding(row.num_blocks, row.num_computed_tokens), row.session)
        self._is_stuck, self._last_report, self._known_run = False, None, None
        self._count_further()

    # -- kinds of the cache ---------------------------------------------------------------------------------------

    def _held(self, row: FastSequence) -> RowHolding:
        """Return what decides how much of windows and states a row holds."""
        num_steps = self.num_steps - row.as_of_step if row.phase is SequencePhase.DECODING else 0
        num_computed, num_unread = row.num_computed_tokens + num_steps, 0
        if self._end_s is not None:
            is_latest = row.phase is not SequencePhase.PREFILLING or row.latest_step == self.num_steps
            num_unread = (1 if num_steps else row.num_unread_tokens) if is_latest else 0
        num_blocks = self.kv.blocks_for(num_computed) if row.phase is SequencePhase.DECODING else row.num_blocks
        return RowHolding(num_blocks, num_computed - num_unread)

    def _count_further(self) -> None:
        """Count what windows and states hold: what the tokens of steps that were read have passed is free."""
        if self.further:
            rows = [*[row for _, row in self._prefilling], *[row for _, _, row in self._decoding], *self._leaving]
            self.further.sync([self._held(row) for row in rows])

    def _has_blocks(self, num_blocks: int) -> bool:
        """Whether so many blocks are free in every kind of vectors."""
        return self.further.append_room(num_blocks) if self.further else num_blocks <= self.kv.num_free

    def _reserve(self, row: FastSequence, sign: int = 1) -> None:
        """Reserve what a prefilling row still needs of windows, or take that back."""
        if self.further:
            self.further.add_reserved(row.num_computed_tokens, row.num_tokens, self._held(row), sign)

    # -- moves of rows --------------------------------------------------------------------------------------------

    def _rank_of(self, row: FastSequence) -> tuple[int, ...]:
        return self._rank(row)  # type: ignore[arg-type]  # a row has all fields that ranks use

    def _queue(self, row: FastSequence) -> None:
        row.phase = SequencePhase.WAITING
        heappush(self._waiting, (self._rank_of(row), row))
        self._num_waiting_tokens += row.num_due_tokens
        self._is_stuck = False

    def _newest(self) -> FastSequence:
        """Return the row to preempt first: the latest arrival among running low-priority rows, or else among all."""
        rows = [row for _, _, row in self._decoding]
        rows += [row for _, row in self._prefilling]
        rows += self._leaving
        return max(rows, key=lambda row: (row.priority, row.arrival))

    def _settle(self, row: FastSequence) -> None:
        """Update the counters of a decoding row that the caller has taken out of the heap."""
        num_steps = self.num_steps - row.as_of_step
        self._num_decode_tokens -= row.num_computed_tokens + num_steps
        self.kv.watch(row.as_of_step, row.num_computed_tokens, -1)
        row.num_computed_tokens += num_steps
        row.num_unread_tokens = 1 if num_steps else row.num_unread_tokens
        row.num_tokens += num_steps
        row.num_left -= num_steps
        row.num_blocks, row.as_of_step = self.kv.blocks_for(row.num_computed_tokens), self.num_steps

    def _preempt(self, row: FastSequence) -> None:
        self.num_preemptions += 1
        if row.phase is SequencePhase.LEAVING:  # the row ends anyway: only its blocks are freed
            self._leaving.remove(row)
            self.kv.give_back(row.num_blocks, row.num_computed_tokens, row.session)
            self.further.release(self._held(row), row.session)
            row.phase = SequencePhase.GONE
            self._num_low_priority -= row.is_low_priority
            return
        if row.phase is SequencePhase.DECODING:
            self._decoding = [each for each in self._decoding if each[2] is not row]
            heapify(self._decoding)
            self._settle(row)
            self._unreported = [each for each in self._unreported if each is not row]
        else:
            self._prefilling.remove((self._rank_of(row), row))
        row.num_preemptions += 1
        row.owner = row.owner if row.owner is not None else self.kv.new_owner()
        self.further.release(self._held(row), row.owner)
        # What a step in flight writes cannot be reused.
        num_unread_tokens = row.num_unread_tokens if self._end_s is not None else 0
        self.kv.give_back(row.num_blocks, row.num_computed_tokens - num_unread_tokens, row.owner)
        row.num_computed_tokens = row.num_blocks = 0
        self._queue(row)


def _num_made(row: FastSequence, num_unread: int, now_s: float) -> int:
    """Return the tokens that were read by then; the last ones may have been sampled by unread steps."""
    if row.first_token_s > now_s:
        return 0
    return max(1, row.num_output_tokens - row.num_left - num_unread)
