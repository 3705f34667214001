"""The state stream: an engine's load reports and prefix changes for its gateways.

The engine client writes into `StatePublisher` after every step; the control port's `/internal/state` reads one
`Subscription` per connection. Changes are coalesced to 20 frames a second, and a frame is sent at least every second,
so that silence means a fault. If several gateways subscribe, an arrived request is published at once, before the engine
process has counted it: otherwise the others would send theirs to the same engine. Each subscriber has a bounded buffer:
one that reads too slowly loses its backlog and gets a snapshot instead, so that a stuck gateway costs the engine
nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from pagemill_engine.ipc.messages import PrefixEvents, Ready
from pagemill_protocol.frames import encode_state
from pagemill_protocol.hashes import HASH_VERSION, NO_HASHES
from pagemill_protocol.report.adapters import AdapterSlots
from pagemill_protocol.report.cache_kinds import FULL, chunk_blocks, further_chunk_blocks
from pagemill_protocol.report.state import WAKE, Digests, EngineLoad, SlowRank, StateFrame, StepTimeParams
from pagemill_protocol.request.generate import GenerateRequest

MIN_INTERVAL_S = 0.05
ARRIVALS_INTERVAL_S = 0.005
"""Minimum time before a frame that publishes an arrived request."""
HEARTBEAT_S = 1.0
MAX_BACKLOG_FRAMES = 64
HEARTBEAT_INTERVAL_S = 3.0
"""Shortest silence of the engine process that is reported; a shorter one is normal."""
MAX_PAUSE_S = 2.0
"""Longest pause between two frames that counts as frozen time. In a longer pause this process did not run."""


class _Arrival(NamedTuple):
    number: int
    num_tokens: int
    """Prompt tokens, without those that are expected to be cached."""
    num_sequences: int


class StatePublisher:
    """Collects changes; `run` turns them into numbered frames for all subscribers."""

    def __init__(self, models: list[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._frame = StateFrame(sequence=0, models=models)
        """The latest published frame, without prefixes."""
        self._prefixes: dict[bytes, None] = {}
        """Published prefix chunks, oldest first."""
        self._pending: dict[bytes, bool] = {}
        """Prefix chunks changed since the latest frame: True for added, False for removed. The last change counts."""
        self._next = self._frame
        self._changed = asyncio.Event()
        self._subscriptions: set[Subscription] = set()
        self._closed = False
        self._reported_s: float | None = None
        """Time at which the engine process last sent a report."""
        self._frozen_s: float | None = None
        """Seconds in which this process ran and the engine process sent nothing; None before the first heartbeat."""
        self._checked_s = self._clock()
        """Time up to which `_frozen_s` counts."""
        self._expected_step_ms = 0.0
        self._load = EngineLoad()
        """Load in the engine process's latest report."""
        self._arrivals: deque[_Arrival] = deque()
        """Requests that `_load` does not count yet."""
        self._arrived = asyncio.Event()

    def announce_bundle(self, digest: str) -> None:
        """Publish the tokenizer's digest.

        It is known long before the engine is ready, so gateways fetch it meanwhile.
        """
        self._update(digests=Digests(tokenizer_bundle=digest, hash_version=HASH_VERSION))

    def announce_names(self, names: list[str]) -> None:
        """Publish the model's names."""
        self._update(models=names)

    def announce_unused(self, names: list[str]) -> None:
        """Publish the settings that have no effect with this kind of model."""
        self._update(unused_settings=names)

    def announce_adapters(self, slots: AdapterSlots) -> None:
        """Publish the adapters that the engine serves."""
        self._update(adapters=slots)

    def announce_slow_rank(self, slow: SlowRank | None) -> None:
        """Publish the process for which the others of this engine wait, or that there is none."""
        self._update(slow_rank=slow)

    def describe(self, ready: Ready) -> None:
        """Publish the properties of the loaded engine."""
        digests = msgspec.structs.replace(
            self._next.digests,
            weights=ready.limits.weights_digest,
            kv_dtype=ready.limits.kv_dtype,
            hash_version=HASH_VERSION if ready.limits.enable_prefix_caching else NO_HASHES,
        )
        kinds = [msgspec.structs.replace(kind, layers=()) for kind in ready.limits.kinds]
        chunk = chunk_blocks(kinds, ready.limits.num_blocks, ready.limits.block_size)
        self._update(
            digests=digests,
            block_size=ready.limits.block_size,
            max_model_len=ready.limits.max_model_len,
            max_num_batched_tokens=ready.limits.max_num_batched_tokens,
            max_num_seqs=ready.limits.max_num_seqs,
            kinds=kinds if kinds != [FULL] else [],
            prefix_chunk_blocks=chunk,
            further_chunk_blocks=further_chunk_blocks(kinds, chunk),
            load=ready.load,
            start_s=ready.start_s,
            pools=ready.limits.pooling is not None,
        )

    def arrived(self, number: int, request: GenerateRequest) -> None:
        """Record that the `number`th request since the start was sent to the engine process."""
        num_tokens = len(request.prompt_token_ids) - request.predicted_cached_tokens
        self._arrivals.append(_Arrival(number, max(1, num_tokens), request.sampling.num_sequences))
        if self._has_several_readers:
            self._update(load=self._with_arrivals())
            self._arrived.set()

    def report(
        self, load: EngineLoad, step_time: StepTimeParams | None, prefixes: PrefixEvents | None, num_added: int = 0
    ) -> None:
        """Publish the changes of one step; called every second when idle.

        `num_added`: number of requests that `load` counts, or that have ended.
        """
        self._reported_s = self._checked_s = self._clock()
        if self._frozen_s is not None:
            self._frozen_s = 0.0
        self._load = load
        while self._arrivals and self._arrivals[0].number <= num_added:
            self._arrivals.popleft()
        if prefixes is not None:
            self._pending.update(dict.fromkeys(prefixes.removed, False))
            self._pending.update(dict.fromkeys(prefixes.added, True))
        self._update(load=self._with_arrivals(), step_time=step_time or self._next.step_time)

    def heartbeat(self, expected_step_ms: float) -> None:
        """Record that the engine process runs. `expected_step_ms`: predicted duration of its current step."""
        self._frozen_s, self._checked_s, self._expected_step_ms = 0.0, self._clock(), expected_step_ms

    def set_draining(self) -> None:
        self._update(draining=True)

    def set_sleeping(self, sleeping: bool) -> None:
        """Publish whether the engine sleeps, which means that it accepts no requests."""
        self._update(sleeping=sleeping)

    def record_wake(self, wake_s: float) -> None:
        """Publish the duration of a wake-up, in addition to the phases of the start."""
        self._update(start_s=self._next.start_s | {WAKE: round(wake_s, 3)}, num_wakes=self._next.num_wakes + 1)

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._changed.set()
        self._arrived.set()
        for subscription in self._subscriptions:
            subscription.close()

    async def run(self) -> None:
        """Publish until closed: at most every `MIN_INTERVAL_S` (arrivals sooner), at least every `HEARTBEAT_S`."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            heartbeat = loop.call_later(HEARTBEAT_S, self._changed.set)
            await self._changed.wait()
            heartbeat.cancel()
            self._changed.clear()
            self._arrived.clear()
            self._publish()
            await asyncio.sleep(ARRIVALS_INTERVAL_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(MIN_INTERVAL_S - ARRIVALS_INTERVAL_S):
                    await self._arrived.wait()

    def subscribe(self) -> Subscription:
        subscription = Subscription(self)
        self._subscriptions.add(subscription)
        if self._closed:
            subscription.close()
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    def snapshot(self) -> bytes:
        """Return a frame with everything published so far; the next published frame continues it."""
        return encode_state(msgspec.structs.replace(self._frame, snapshot=True, prefixes_added=list(self._prefixes)))

    @property
    def _has_several_readers(self) -> bool:
        """Whether arrivals must be published. A single gateway knows what it has sent."""
        return len(self._subscriptions) > 1

    def _with_arrivals(self) -> EngineLoad:
        if not (self._arrivals and self._has_several_readers):
            return self._load
        return msgspec.structs.replace(
            self._load,
            num_requests_waiting=self._load.num_requests_waiting + sum(each.num_sequences for each in self._arrivals),
            num_tokens_waiting=self._load.num_tokens_waiting + sum(each.num_tokens for each in self._arrivals),
        )

    def _update(self, **changes: object) -> None:
        following = msgspec.structs.replace(self._next, **changes)
        if following != self._next or self._pending:
            self._next = following
            self._changed.set()

    def _publish(self) -> None:
        added = [chunk for chunk, present in self._pending.items() if present and chunk not in self._prefixes]
        removed = [chunk for chunk, present in self._pending.items() if not present and chunk in self._prefixes]
        self._pending.clear()
        self._prefixes.update(dict.fromkeys(added))
        for prefix_chunk in removed:
            del self._prefixes[prefix_chunk]
        self._next = self._frame = msgspec.structs.replace(self._next, sequence=self._frame.sequence + 1)
        silent_s, frozen_s = self._silent_s(), self._count_frozen_s()
        if not self._subscriptions:
            return
        encoded = encode_state(
            msgspec.structs.replace(
                self._frame,
                prefixes_added=added,
                prefixes_removed=removed,
                silent_s=silent_s,
                frozen_s=frozen_s,
                expected_step_ms=round(self._expected_step_ms, 1) if silent_s else 0.0,
            )
        )
        for subscription in self._subscriptions:
            subscription.put(encoded)

    def _count_frozen_s(self) -> float:
        now_s = self._clock()
        if self._frozen_s is not None:
            self._frozen_s += min(MAX_PAUSE_S, now_s - self._checked_s)
        self._checked_s = now_s
        return round(self._frozen_s or 0.0, 1) if (self._frozen_s or 0.0) >= HEARTBEAT_INTERVAL_S else 0.0

    def _silent_s(self) -> float:
        silent_s = self._clock() - self._reported_s if self._reported_s is not None else 0.0
        return round(silent_s, 1) if silent_s >= HEARTBEAT_INTERVAL_S else 0.0


class Subscription:
    """One reader of the stream: an async iterator of encoded frames."""

    def __init__(self, publisher: StatePublisher) -> None:
        self._publisher = publisher
        self._frames: deque[bytes] = deque()
        self._needs_snapshot = True
        self._wakeup = asyncio.Event()
        self._wakeup.set()
        self._closed = False

    def put(self, encoded: bytes) -> None:
        """Queue a frame, or fall back to a snapshot when the reader is too far behind."""
        if self._needs_snapshot:
            return
        if len(self._frames) >= MAX_BACKLOG_FRAMES:
            self._frames.clear()
            self._needs_snapshot = True
        else:
            self._frames.append(encoded)
        self._wakeup.set()

    def close(self) -> None:
        self._closed = True
        self._wakeup.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while not self._closed:
                await self._wakeup.wait()
                self._wakeup.clear()
                if self._needs_snapshot:
                    self._needs_snapshot = False
                    yield self._publisher.snapshot()
                while self._frames and not self._closed:
                    yield self._frames.popleft()
        finally:
            self._publisher.unsubscribe(self)
