"""Engines in fast-forward: `fast_pod` between two changes, and the frames that it would send. Implements `engines`.

A frame is sent if it would differ by more than steps of the same decodes, which the gateway predicts: after arrivals,
ends and steps that compute prompts, at most 20 per second and at least one per second. Prefix chunks are named by
session instead of by hash: requests without a session share nothing. There are no adapters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.limits import scheduler_limits
from pagemill_execution.runners.null import DEFAULT_STEP_TIME, NullRunner
from pagemill_protocol.errors import context_length_exceeded, unavailable
from pagemill_protocol.hashes import key_of_kind
from pagemill_protocol.report.cache_kinds import ONE_KIND, chunk_blocks, further_chunk_blocks
from pagemill_protocol.report.state import EngineLoad, StateFrame
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_routing.admission.reservations import REPORTS_UNTIL_COUNTED
from pagemill_routing.brain.interface import HashScheme
from pagemill_simulator.events import Events
from pagemill_simulator.fleet.conversations import FILLER
from pagemill_simulator.fleet.engines.engines import Deliver, Observe, TokenDelivery
from pagemill_simulator.fleet.engines.fast_pod import FastPod
from pagemill_simulator.fleet.engines.fast_sequence import FastSequence
from pagemill_simulator.fleet.engines.fast_steps import StepTimes
from pagemill_simulator.pod import FRAME_INTERVAL_S, HEARTBEAT_S, NETWORK_S, digests_of

ROUNDING_S = 1e-9
"""Tolerance in seconds that makes an event visible at its instant despite rounding errors of times."""


class FastEngines:
    """Implements `engines.EngineKind`."""

    is_exact = False

    def __init__(self, config: EngineConfig, events: Events) -> None:
        self._events = events
        engine = msgspec.structs.replace(config, null_runner=True)
        info = NullRunner.from_config(engine).info
        self._limits = limits = scheduler_limits(engine, info)
        self._overlaps = info.overlaps if engine.overlap is None else engine.overlap
        self._steps = StepTimes(engine.step_time or DEFAULT_STEP_TIME, limits.max_num_batched_tokens)
        self.vocab_size = limits.vocab_size
        chunk = chunk_blocks(limits.kinds, limits.num_blocks, limits.block_size)
        self._frame = StateFrame(
            sequence=0,
            digests=digests_of(info, hashes=limits.enable_prefix_caching),
            step_time=msgspec.structs.replace(self._steps.model.params(), num_steps_observed=1),
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            prefix_chunk_blocks=chunk,
            further_chunk_blocks=further_chunk_blocks(limits.kinds, chunk),
            kinds=[] if limits.kinds == ONE_KIND else list(limits.kinds),
        )

    def start(self, pod_name: str, observe: Observe, deliver: Deliver, start_s: dict[str, float]) -> FastEngine:
        pod = FastPod(self._limits, self._steps, overlaps=self._overlaps)
        frame = msgspec.structs.replace(self._frame, start_s=start_s)
        return FastEngine(pod, frame, self._events, observe, deliver)

    def prefix_chunks(
        self, prompt: Sequence[int], session: int | None, scheme: HashScheme, adapter_digest: str
    ) -> tuple[bytes, ...]:
        if session is None or not scheme.prefix_chunk_tokens:
            return ()
        return tuple(_prefix_chunk(session, place) for place in range(len(prompt) // scheme.prefix_chunk_tokens))


def _prefix_chunk(session: int, place: int) -> bytes:
    return session.to_bytes(8, "big") + place.to_bytes(4, "big")


class FastEngine:
    """Implements `engines.SimulatedEngine`."""

    num_adapter_loads = 0

    def __init__(self, pod: FastPod, frame: StateFrame, events: Events, observe: Observe, deliver: Deliver) -> None:
        """`frame` has the common fields of all frames."""
        self._pod = pod
        self._common = frame
        self._events = events
        self._observe = observe
        self._deliver = deliver
        self.is_up = True
        self._stopped_s = math.inf
        self._is_draining = False
        self._sequence = 0
        self._looked_at_s: float | None = None
        """Time of the next look at the pod."""
        self._reported_s = -FRAME_INTERVAL_S
        self._was_idle = True
        """Whether the pod was idle at its latest report."""
        self._is_report_due = False
        self._num_owed = 0
        """Number of reports until the gateway counts all present requests as reported."""
        self._reported_chunks: dict[int, list[range]] = {}
        """Indices of the reported prefix chunks of each kind by session."""
        events.after(HEARTBEAT_S, self._heartbeat)

    @property
    def weights_digest(self) -> str:
        return self._common.digests.weights

    @property
    def load(self) -> EngineLoad:
        self._pod.advance(self._events.now_s)
        return self._pod.load()

    @property
    def num_output_tokens(self) -> int:
        now = min(self._events.now_s, self._stopped_s)
        self._pod.advance(now)
        return self._pod.num_read_tokens(now)

    def snapshot(self) -> StateFrame:
        return self._make_frame(snapshot=True)

    def enter(self, request: GenerateRequest, session: int | None) -> None:
        num_made = len(request.resume[0].token_ids) if request.resume else 0
        num_prompt_tokens, limits, now = len(request.prompt_token_ids), self._pod.limits, self._events.now_s
        room = limits.max_total_tokens - num_prompt_tokens
        if room < 1:
            raise context_length_exceeded(num_prompt_tokens, limits.max_model_len, "prompt")
        if self._pod.num_waiting >= limits.max_num_waiting:
            raise unavailable("The queue of the simulated engine is full.", retry_after_s=1)
        num_output_tokens = min(request.sampling.max_tokens or room, room) - num_made
        self._pod.advance(now)
        row = FastSequence(now, num_prompt_tokens + num_made, num_output_tokens, session, request.request_id)
        row.priority = request.priority
        self._pod.add(row, now)
        self._num_owed = REPORTS_UNTIL_COUNTED
        self._plan()

    def drain(self) -> None:
        self._is_draining = True
        self._report_in_time(self._events.now_s)

    def stop(self) -> None:
        now, pod = self._events.now_s, self._pod
        pod.advance(now)
        self._pass_on(now)
        self.is_up, self._stopped_s = False, now
        if cut := pod.cut(now):
            self._events.after(NETWORK_S, partial(self._deliver_cut, cut))

    def check(self) -> None:
        if not self._pod.has_work and any(each.active for each in self._pod.further.load()):
            raise RuntimeError("an idle fast pod holds blocks")

    # Progress of requests.

    def _plan(self) -> None:
        """Schedule the next look at the pod for its next event."""
        for row in self._pod.take_started():
            self._events.at(row.first_token_s + NETWORK_S, partial(self._deliver_first, row))
        news_s = self._pod.next_news_s()
        if news_s != self._looked_at_s:
            self._looked_at_s = news_s
            if news_s < math.inf:
                self._events.at(news_s + ROUNDING_S, partial(self._look, news_s))

    def _look(self, news_s: float) -> None:
        if self._looked_at_s != news_s or not self.is_up:
            return
        now, self._looked_at_s = self._events.now_s, None
        self._pod.advance(now)
        self._pass_on(now)
        self._plan()
        if not self._pod.is_starting:
            self._report_in_time(now)

    def _deliver_first(self, row: FastSequence) -> None:
        if not row.num_delivered and row.first_token_s <= self._stopped_s:
            row.num_delivered = 1
            is_last = row.num_output_tokens == 1
            self._deliver([TokenDelivery(str(row.client), [FILLER], row.num_cached_tokens, is_last)])

    def _pass_on(self, now: float) -> None:
        """Schedule the delivery of answers that are complete by now."""
        ended = self._pod.ended
        while ended and ended[0].end_s <= now + ROUNDING_S:
            row = ended.popleft()
            self._events.at(row.end_s + NETWORK_S, partial(self._deliver_rest, row))

    def _deliver_rest(self, row: FastSequence) -> None:
        num_tokens = row.num_output_tokens - row.num_delivered
        if num_tokens:
            row.num_delivered += num_tokens
            self._deliver([TokenDelivery(str(row.client), [FILLER] * num_tokens, row.num_cached_tokens, True)])

    def _deliver_cut(self, cut: Sequence[tuple[FastSequence, int]]) -> None:
        """Deliver the tokens of answers that end here unfinished."""
        for row, num_made in cut:
            num_tokens = num_made - row.num_delivered
            if num_tokens > 0:
                self._deliver([TokenDelivery(str(row.client), [FILLER] * num_tokens, row.num_cached_tokens, False)])

    # Reports.

    def _report_in_time(self, now: float) -> None:
        """Report a change, but not more often than allowed."""
        if self._is_report_due:
            return
        due_s = self._reported_s + FRAME_INTERVAL_S
        if due_s < now:
            # A pod with work reports continuously.
            late_s = (now - due_s) % FRAME_INTERVAL_S
            due_s = now if self._was_idle else now + FRAME_INTERVAL_S - late_s
        if due_s <= now:
            self._report()
        else:
            self._is_report_due = True
            self._events.at(due_s, self._report)

    def _report(self) -> None:
        if not self.is_up:
            return
        now, pod = self._events.now_s, self._pod
        pod.advance(now)
        self._reported_s, self._was_idle = now, not pod.has_work
        self._num_owed = max(0, self._num_owed - 1)
        self._events.after(NETWORK_S, partial(self._observe, self._make_frame()))
        # A pod that decides each step soon has more to report, and only reports confirm that a request has arrived.
        self._is_report_due = pod.has_work and (pod.has_more_to_report or self._num_owed > 0)
        if self._is_report_due:
            self._events.after(FRAME_INTERVAL_S, self._report)

    def _heartbeat(self) -> None:
        if not self.is_up:
            return
        now = self._events.now_s
        if not self._is_report_due and now - self._reported_s >= HEARTBEAT_S - ROUNDING_S:
            self._report()
        self._events.at(max(self._reported_s, now - HEARTBEAT_S / 2) + HEARTBEAT_S, self._heartbeat)

    def _make_frame(self, *, snapshot: bool = False) -> StateFrame:
        self._sequence += 1
        added, removed = self._changed_chunks()
        return msgspec.structs.replace(
            self._common,
            sequence=self._sequence,
            snapshot=snapshot,
            load=self._pod.load(),
            draining=self._is_draining,
            prefixes_added=added,
            prefixes_removed=removed,
        )

    def _changed_chunks(self) -> tuple[list[bytes], list[bytes]]:
        """Return the chunks added and removed since the previous frame."""
        added: list[bytes] = []
        removed: list[bytes] = []
        kinds, reported = self._pod.further, self._reported_chunks
        for session in kinds.take_changed():
            now = kinds.findable(session, self._common.prefix_chunk_blocks)
            before = reported.pop(session, [range(0)] * len(now))
            for number, (old, new) in enumerate(zip(before, now, strict=True)):
                added += [key_of_kind(number, _prefix_chunk(session, place)) for place in _only_in(new, old)]
                removed += [key_of_kind(number, _prefix_chunk(session, place)) for place in _only_in(old, new)]
            if any(now):
                reported[session] = now
        return added, removed


def _only_in(places: range, others: range) -> Sequence[int]:
    """Return the places that are not among others."""
    if places.start == others.start:
        return places[len(others) :]
    return [place for place in places if place not in others]
