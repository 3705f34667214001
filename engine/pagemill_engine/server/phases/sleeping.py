"""Sleep and wake-up of a loaded engine: decides when it accepts requests, and commands the engine process.

Going to sleep begins at once and ends when the last running request is done; until then, and while the engine sleeps,
new requests are refused. Gateways learn this from the state stream; a request that was sent before is refused and goes
to another engine. Waking cancels a sleep that has not begun. `sleep_routes` calls this, `engine_client` delivers the
engine process's answers, `lifecycle` and `state_stream` publish the state.
"""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol

from pagemill_engine.ipc.messages import Awake, Sleep, Slept, ToEngine, Wake
from pagemill_engine.server.metrics import ServerMetrics
from pagemill_engine.server.phases.lifecycle import Lifecycle
from pagemill_engine.server.phases.state_stream import StatePublisher

State = Literal["awake", "falling_asleep", "asleep", "waking"]


class Sleeper(Protocol):
    """The methods of the engine client that `Sleeping` needs."""

    @property
    def num_requests(self) -> int: ...
    async def wait_idle(self) -> None: ...
    def send(self, message: ToEngine) -> None: ...


class Sleeping:
    def __init__(self, lifecycle: Lifecycle, publisher: StatePublisher, metrics: ServerMetrics) -> None:
        self._lifecycle = lifecycle
        self._publisher = publisher
        self._metrics = metrics
        self.state: State = "awake"
        self.released_bytes = 0
        """Bytes released by the latest sleep."""
        self.fault = ""
        """Why the latest sleep failed; "" if it did not."""
        self._changed = asyncio.Event()
        self._sleep_task: asyncio.Task[None] | None = None

    async def sleep(self, client: Sleeper, wait_s: float) -> State:
        """Put the engine to sleep as soon as nothing runs, and return the state.

        Returns once it sleeps or cannot sleep, or after `wait_s`; the request to sleep stays in force.
        """
        await self._while("waking", wait_s)
        if self.state == "awake" and self._lifecycle.ready:
            self.fault = ""
            self._enter("falling_asleep", f"{client.num_requests} requests are still running; new ones are refused")
            self._sleep_task = asyncio.create_task(self._put_to_sleep(client), name="sleep")
        await self._while("falling_asleep", wait_s)
        return self.state

    async def wake(self, client: Sleeper, wait_s: float) -> State:
        """Let the engine accept requests again. Returns the state once it does, or after `wait_s`."""
        if self.state in ("falling_asleep", "asleep"):
            self._cancel_sleep_task()
            self._enter("waking", "allocating the KV cache again")
            client.send(Wake())
        await self._while("waking", wait_s)
        return self.state

    def slept(self, message: Slept) -> None:
        """Record that the engine process sleeps, or that it cannot."""
        if self.state != "falling_asleep":
            return  # It was woken meanwhile and will report that.
        if message.fault:
            self.fault = message.fault
            self._enter("awake", "could not sleep")
            return
        self.released_bytes = message.released_bytes
        self._enter("asleep", "the weights stay in memory; the KV cache's memory is freed")

    def record_wake(self, message: Awake) -> None:
        """Record that the engine process generates again."""
        if self.state != "waking":
            return
        if message.wake_s > 0:
            self._metrics.record_wake(message.wake_s)
            self._publisher.record_wake(message.wake_s)
        self._enter("awake", f"awake after {message.wake_s:.2f} s")

    async def close(self) -> None:
        self._cancel_sleep_task()

    async def _put_to_sleep(self, client: Sleeper) -> None:
        await client.wait_idle()
        client.send(Sleep())

    def _cancel_sleep_task(self) -> None:
        if self._sleep_task is not None:
            self._sleep_task.cancel()
            self._sleep_task = None

    def _enter(self, state: State, detail: str) -> None:
        self.state = state
        phases = {"awake": "ready", "waking": "waking"}
        # The state stream first: a server that is ready accepts requests.
        self._publisher.set_sleeping(state != "awake")
        self._metrics.sleeping(state == "asleep")
        self._lifecycle.enter(phases.get(state, "sleeping"), detail)
        self._changed.set()

    async def _while(self, state: State, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while self.state == state:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
