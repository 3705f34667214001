"""The queues of all deployments, in which requests wait for capacity on an engine or for any engine at all.

A waiting request has an attempt, which is called at its turn. It returns the result, or None to continue waiting, or
raises the error for the client. `admission.fair_queue` defines the order, the bounds and shedding; this module has the
futures, the clock and the errors. Code that changes what attempts depend on calls `pump`. A periodic tick handles
timeouts.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from pagemill_protocol.errors import PagemillError, deadline_exceeded, internal_error, unavailable
from pagemill_protocol.resource.served import QueueLimits
from pagemill_routing.brain.interface import QueueTicket
from pagemill_routing.brain.queue.deployment_queue import DeploymentQueue, QueueEntry

logger = logging.getLogger("pagemill.gateway.brain")
TICK_S = 0.1
Outcome = Literal["served", "shed", "full", "timeout", "deadline", "failed", "left"]
OUTCOMES: tuple[Outcome, ...] = ("served", "shed", "full", "timeout", "deadline", "failed", "left")
"""`shed`: overload removed the request. `full`: the queue did not accept it. `deadline`: it missed its deadline, or
would miss it. `failed`: its attempt raised an error. `left`: its client disconnected.
"""
Found = TypeVar("Found")


class QueueState(NamedTuple):
    num_requests: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    """The expected cost of their turns; 0 for requests that cannot be tokenized yet."""
    oldest_age_s: float = 0.0
    """Time since the arrival of the oldest waiting request at the gateway."""


class Queues:
    def __init__(
        self,
        clock: Callable[[], float],
        is_serving: Callable[[str], bool],
        start_left_s: Callable[[str], float | None] = lambda _: None,
        waits_until: Callable[[str, float], float] = lambda _deployment, _arrived_at: -math.inf,
    ) -> None:
        """`is_serving`: whether a deployment has a serving engine; the queue's rate is measured only then.

        `start_left_s`: the time until a deployment has an engine again, or `None` if it has one or that is unknown.
        `waits_until`: the time until which a request that arrived then may wait for a start, also beyond the timeout.
        """
        self._clock = clock
        self._is_serving = is_serving
        self._start_left_s = start_left_s
        self._waits_until = waits_until
        self._queues: dict[str, DeploymentQueue] = {}
        self._ticking: asyncio.TimerHandle | None = None
        self.outcomes: Counter[tuple[str, Outcome]] = Counter()
        """The outcomes of waiting requests by deployment, since the start."""
        self._watchers: set[asyncio.Future[None]] = set()

    def is_empty(self, deployment: str) -> bool:
        queue = self._queues.get(deployment)
        return queue is None or not len(queue.waiting)

    def state(self, deployment: str) -> QueueState:
        queue = self._queues.get(deployment)
        oldest = queue.waiting.oldest_arrival() if queue is not None else None
        if queue is None or oldest is None:
            return QueueState()
        waiting = queue.waiting
        return QueueState(len(waiting), waiting.num_bytes, waiting.num_tokens, max(0.0, self._clock() - oldest))

    def left_s(self, deployment: str, ticket: QueueTicket) -> float | None:
        """Return how much longer the ticket's request will wait, including an engine's start; `None` if unknown."""
        queue = self._queues.get(deployment)
        start_left_s = self._start_left_s(deployment)
        if queue is None or (start_left_s is None and not self._is_serving(deployment)):
            return None
        turn_s = queue.drain.wait_s(queue.waiting.tokens_until(ticket.arrived_at))
        return start_left_s if turn_s is None else (start_left_s or 0.0) + turn_s

    def first_waiter(self) -> asyncio.Future[None]:
        """Return a future that is done when a request enters an empty queue; cancel it if it is not needed."""
        watcher = asyncio.get_running_loop().create_future()
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return watcher

    def settle(self, deployment: str, key: str, priority: int, num_tokens: int) -> None:
        """Charge a key the difference to the expected cost of a turn, which may be negative."""
        queue = self._queues.get(deployment)
        if queue is not None:
            queue.waiting.settle(key, priority, num_tokens)

    async def wait(
        self,
        deployment: str,
        limits: QueueLimits,
        ticket: QueueTicket,
        attempt: Callable[[], Found | None],
        *,
        group: str,
        cost_tokens: int,
        undo: Callable[[Found], None],
        kept: bool = False,
    ) -> tuple[Found, float]:
        """Wait until `attempt` returns a result; return it and the waiting time in seconds. Raises `PagemillError`.

        Requests of one `group` need the same endpoints. `undo` is called with a result for a caller that was cancelled.
        `kept`: overload must not shed the request.
        """
        queue = self._queues.get(deployment)
        if queue is None:
            queue = self._queues[deployment] = DeploymentQueue(limits, partial(self._start_left_s, deployment))
        queue.set_limits(limits)
        now = self._clock()
        timeout_at = now + max(0.0, limits.timeout_s - ticket.waited_s)
        entry = QueueEntry(
            key=ticket.key,
            priority=ticket.priority,
            cost_tokens=0 if ticket.paid else cost_tokens,
            num_bytes=ticket.num_bytes,
            arrived_at=ticket.arrived_at,
            expires_at=min(max(timeout_at, self._waits_until(deployment, ticket.arrived_at)), ticket.deadline_at),
            group=group,
            kept=kept,
            attempt=attempt,
            future=asyncio.get_running_loop().create_future(),
            entered_at=now,
            deadline_at=ticket.deadline_at,
        )
        self._admit(deployment, queue, entry)
        try:
            # A request that was refused everywhere has just tried all endpoints and waits for a change.
            if ticket.num_refusals == 0:
                self.pump(deployment)
            found: Found = await entry.future
        except asyncio.CancelledError:
            if not entry.future.done() or entry.future.cancelled():
                self.outcomes[deployment, "left"] += 1
            elif entry.future.exception() is None:
                undo(entry.future.result())
            raise
        finally:
            if entry in queue.waiting:
                queue.waiting.remove(entry)
                self.pump(deployment)
            # An error on its future references this frame: break the cycle, which would keep the request's body.
            del entry
        return found, self._clock() - now

    def pump(self, deployment: str) -> None:
        """Call the attempts of waiting requests in their order, until none succeeds."""
        queue = self._queues.get(deployment)
        if queue is None or not len(queue.waiting):
            return
        now, waiting = self._clock(), queue.waiting
        queue.drain.watch(now, self._is_serving(deployment))
        blocked: set[str] = set()
        while (entry := waiting.first(blocked)) is not None:
            if entry.future.done():
                waiting.remove(entry)
                continue
            try:
                found = entry.attempt()
            except PagemillError as error:
                self._fail(deployment, queue, entry, error, "failed")
                continue
            except Exception:
                # The caller handles another request or a report, which must not fail.
                logger.exception("a request of %s cannot be placed", deployment)
                self._fail(deployment, queue, entry, internal_error(), "failed")
                continue
            if found is None:
                blocked.add(entry.group)
                continue
            waiting.take(entry)
            queue.drain.served(entry.cost_tokens)
            self.outcomes[deployment, "served"] += 1
            entry.future.set_result(found)
        if not len(waiting):
            queue.drain.watch(now, waiting=False)

    def pump_all(self) -> None:
        for deployment in list(self._queues):
            self.pump(deployment)

    def tick(self) -> None:
        """End the requests that have waited too long, and try the others, because pauses may be over."""
        for deployment, queue in list(self._queues.items()):
            for entry in queue.waiting.expired(self._clock()):
                late = entry.deadline_at <= entry.expires_at
                error = deadline_exceeded() if late else queue.timed_out(self._clock() - entry.entered_at)
                self._fail(deployment, queue, entry, error, "deadline" if late else "timeout")
            self.pump(deployment)

    def forget(self, deployments: set[str]) -> None:
        """Remove the empty queues and the outcomes of deployments that are gone."""
        for deployment in deployments:
            if self.is_empty(deployment):
                self._queues.pop(deployment, None)
                for outcome in OUTCOMES:
                    self.outcomes.pop((deployment, outcome), None)

    def _admit(self, deployment: str, queue: DeploymentQueue, entry: QueueEntry) -> None:
        """Add an entry to its queue. Raises `PagemillError` if the request must not wait."""
        if self._is_serving(deployment) and (wait_s := queue.excess_wait_s(entry)) is not None:
            self.outcomes[deployment, "deadline"] += 1
            raise unavailable(
                f"The request would wait about {wait_s:.0f} s for its turn, longer than its deadline allows. Try again "
                "later, or allow more time.",
                retry_after_s=queue.retry_after_s(),
                code="deadline_unreachable",
            )
        was_empty = not len(queue.waiting)
        for gone in queue.waiting.add(entry):
            if gone is entry:
                self.outcomes[deployment, "full"] += 1
                raise queue.full()
            self._fail(deployment, queue, gone, queue.full(), "shed")
        self._keep_ticking()
        if was_empty:
            queue.drain.watch(self._clock(), self._is_serving(deployment))
            self._notify_watchers()

    def _fail(
        self, deployment: str, queue: DeploymentQueue, entry: QueueEntry, error: PagemillError, outcome: Outcome
    ) -> None:
        queue.waiting.remove(entry)
        if not entry.future.done():
            self.outcomes[deployment, outcome] += 1
            entry.future.set_exception(error)

    def _notify_watchers(self) -> None:
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)

    def _keep_ticking(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        self.tick()
        if any(len(queue.waiting) for queue in self._queues.values()):
            self._keep_ticking()
