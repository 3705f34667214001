"""Lines of a batch beside live requests, started by the gateway's own rule when capacity is idle.

They wait in no queue: the rule is asked every few hundredths of a second, as the gateway's batches do. `relay` takes a
line through the brain like any request, with low priority.
"""

from __future__ import annotations

from pagemill_gateway.batches.idle import POLL_S
from pagemill_gateway.config import BatchesConfig
from pagemill_routing.brain.brain import LocalBrain
from pagemill_simulator.events import Events, EventsLoop
from pagemill_simulator.fleet.conversations import fresh_prompt
from pagemill_simulator.fleet.event_log import EventLog
from pagemill_simulator.fleet.relay import MODEL, SimulatedRelay
from pagemill_simulator.workloads.request import Workload


class BatchLines:
    def __init__(
        self,
        workload: Workload,
        config: BatchesConfig,
        vocab_size: int,
        brain: LocalBrain,
        relay: SimulatedRelay,
        events: Events,
        loop: EventsLoop,
        event_log: EventLog,
    ) -> None:
        self._lines = workload.lines
        self._first_index = len(workload.requests)
        self._num_started = self._num_running = 0
        self._config = config
        self._vocab_size = vocab_size
        self._brain = brain
        self._relay = relay
        self._events = events
        self._loop = loop
        self._event_log = event_log

    def begin(self) -> None:
        if self._lines:
            self._events.at(self._lines[0].arrival_s, self._poll)

    def _poll(self) -> None:
        if self._num_started < len(self._lines):
            self._loop.spawn(self._start())
            self._events.after(POLL_S, self._poll)

    async def _start(self) -> None:
        """Start as many lines as there is idle capacity for."""
        for _ in range(await self._brain.idle_capacity(MODEL, self._config.max_load)):
            is_over = (
                self._num_started == len(self._lines) or self._lines[self._num_started].arrival_s > self._events.now_s
            )
            if is_over or self._num_running >= self._config.max_concurrency:
                return
            self._num_started, self._num_running = self._num_started + 1, self._num_running + 1
            self._loop.spawn(self._serve(self._num_started - 1))

    async def _serve(self, number: int) -> None:
        line = self._lines[number]
        index = self._first_index + number
        prompt = fresh_prompt(index, line.num_prompt_tokens, self._vocab_size)
        served, _ = await self._relay.serve(index, line, prompt)
        self._num_running -= 1
        self._event_log.line_ended(served)
