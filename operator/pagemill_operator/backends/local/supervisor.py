"""Keeps one process running: starts it, follows its `/readyz`, restarts it if it crashes or hangs, and ends it.

It knows nothing of engines or gateways: `prepare` returns what to start, anew for each start (new ports). While the
process is not ready, the reason is known: its answer to `/readyz`, or why it crashed and when it restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from pagemill_operator.backends.base import Event
from pagemill_operator.backends.local.child import Child, Exit
from pagemill_operator.backends.local.settings import LocalSettings
from pagemill_operator.backends.local.state_dir import StateDir
from pagemill_operator.plan.types import Probe
from pagemill_operator.status.conditions import Phase

READYZ_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
MAX_READYZ_BYTES = 64 * 1024
_UNREADY: Mapping[str, Phase] = {"sleeping": "asleep", "waking": "waking"}
"""Phases of `/readyz` in which a process is neither ready nor starting."""


@dataclass(frozen=True)
class ReadyzAnswer:
    """A process's answer to `/readyz`."""

    ready: bool
    message: str
    """Phase and detail for users, if the process is not ready."""
    phase: str = ""
    """The phase as the process reports it."""


@dataclass(frozen=True)
class Launch:
    """One start of a process."""

    command: tuple[str, ...]
    environment: dict[str, str]
    data_url: str
    control_url: str


class Supervisor:
    def __init__(
        self,
        name: str,
        prepare: Callable[[], Launch],
        *,
        readiness: Probe | None,
        liveness: Probe | None,
        settings: LocalSettings,
        state_dir: StateDir,
        session: aiohttp.ClientSession,
        on_change: Callable[[], None],
        on_event: Callable[[Event], None],
    ) -> None:
        self.name = name
        self.phase: Phase = "starting"
        self.reason = ""
        self.message = "starting"
        self.num_crashes = 0
        self.is_permanent = False
        """Whether the latest crash has a cause that another start would meet again."""
        self.was_ready = False
        """Whether the process has ever been ready, in any of its starts."""
        self.launch: Launch | None = None
        """The running process's launch; set once its control port has answered."""
        self._prepare = prepare
        self._readiness = readiness
        self._liveness = liveness
        self._unresponsive = ""
        """Why the process was ended as unresponsive; empty if it was not."""
        self._settings = settings
        self._state_dir = state_dir
        self._session = session
        self._on_change = on_change
        self._on_event = on_event
        self._child: Child | None = None
        self._ending = asyncio.Event()
        self._asking = asyncio.Lock()
        """Keeps answers in the order of the requests."""
        self._task: asyncio.Task[None] | None = None
        self._started_s = self._ready_s = time.monotonic()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child and self._child.running else None

    @property
    def ready_at(self) -> float:
        """Monotonic time at which the process became ready, in seconds; 0 if it is not ready."""
        return self._ready_s if self.phase == "ready" else 0.0

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise(), name=f"supervise:{self.name}")

    def warn(self, message: str) -> None:
        """Report a warning about this process to users."""
        self._on_event(Event(self.name, message, time.monotonic() - self._started_s, warning=True))

    async def refresh(self) -> None:
        """Read the phase now, because the process was just ordered to change it."""
        if self.launch is not None:
            await self._ask(self.launch)

    def announce_end(self) -> None:
        """Mark the process as draining: crashes are not repaired any more and it gets no new requests."""
        self._ending.set()
        self._set("draining", "Draining", "draining")

    def kill(self) -> None:
        """Kill the process at once; `end` must still be awaited."""
        self.announce_end()
        if self._child:
            self._child.kill()

    async def end(self, timeout_s: float) -> None:
        """Send SIGTERM, wait at most `timeout_s` seconds, and kill the process."""
        if not self._ending.is_set():
            self.announce_end()
        if self._child:
            await self._child.end(timeout_s)
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._child:
            # The process may have been started during the lines above.
            await self._child.end(timeout_s)
        self.launch = None
        self._set("gone", "", "")

    async def _supervise(self) -> None:
        pause_s = self._settings.backoff_first_s
        while not self._ending.is_set():
            ended, ready_for_s = await self._run_once()
            if self._ending.is_set():
                return
            self.num_crashes += 1
            if ready_for_s > self._settings.stable_after_s:
                pause_s = self._settings.backoff_first_s
            self.is_permanent = ended.is_permanent
            self._set("crashed", ended.reason, ended.message)
            self.warn(f"{ended.reason}: {ended.message}; starting again in {pause_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause_s)
            pause_s = min(self._settings.backoff_longest_s, pause_s * 2)

    async def _run_once(self) -> tuple[Exit, float]:
        """Run the process once; return why it ended, and the seconds that it was ready."""
        self._started_s = time.monotonic()
        self._ready_s = float("inf")
        self._unresponsive = ""
        self._set("starting", "Starting", "starting")
        try:
            launch = self._prepare()
            self._child = await Child.start(launch.command, launch.environment, self._state_dir.log_path(self.name))
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            return Exit("StartFailed", f"cannot start the process: {error.strerror}{where}", is_permanent=True), 0.0
        followers = [
            asyncio.create_task(self._follow(launch), name=f"readyz:{self.name}"),
            asyncio.create_task(self._end_when_silent(launch, self._child), name=f"livez:{self.name}"),
        ]
        try:
            ended = await self._child.wait()
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)
            self.launch = None
        ready_for_s = time.monotonic() - self._ready_s
        if self._unresponsive:
            return Exit("Unresponsive", self._unresponsive), ready_for_s
        return ended, ready_for_s

    async def _follow(self, launch: Launch) -> None:
        """Poll `/readyz` until cancelled; each new answer, or a long silence, sets the phase and its reason."""
        num_silent = 0
        while True:
            if self._child:
                self._child.bound_log()
            answer = await self._ask(launch)
            num_silent = 0 if answer else num_silent + 1
            if self.phase == "ready" and self._readiness and num_silent >= self._readiness.failure_threshold:
                self._set("loading", "Unresponsive", "does not answer")
                self.warn("does not answer")
            is_stable = self.phase in ("ready", "asleep")
            await asyncio.sleep(self._settings.watch_interval_s if is_stable else self._settings.readyz_interval_s)

    async def _ask(self, launch: Launch) -> ReadyzAnswer | None:
        async with self._asking:
            answer = await ask_readyz(self._session, launch.control_url)
            if answer and not self._ending.is_set():
                self.launch = launch
                self._note(answer)
            return answer

    async def _end_when_silent(self, launch: Launch, child: Child) -> None:
        """End the process if it was ready and then leaves too many liveness requests unanswered."""
        probe, num_silent = self._liveness, 0
        if probe is None:
            return
        while num_silent < probe.failure_threshold:
            await asyncio.sleep(probe.period_s)
            if self._ready_s == float("inf") or self._ending.is_set():
                continue
            alive = await ask_alive(self._session, f"{launch.control_url}{probe.path}")
            num_silent = 0 if alive else num_silent + 1
        if self._ending.is_set():
            return
        self._unresponsive = f"did not answer {probe.path} {num_silent} times, {probe.period_s:g} s apart"
        await child.end(self._settings.stop_timeout_s)

    def _note(self, answer: ReadyzAnswer) -> None:
        if answer.ready:
            if self.phase != "ready":
                self._ready_s = time.monotonic()
                self.was_ready = True
                self._set("ready", "Ready", "ready")
                self._report("ready")
            return
        phase = _UNREADY.get(answer.phase, "loading")
        if (self.phase, self.message) != (phase, answer.message):
            self._set(phase, phase.capitalize(), answer.message)
            self._report(answer.message)

    def _set(self, phase: Phase, reason: str, message: str) -> None:
        self.phase, self.reason, self.message = phase, reason, message
        self._on_change()

    def _report(self, message: str) -> None:
        self._on_event(Event(self.name, message, time.monotonic() - self._started_s))


async def ask_readyz(session: aiohttp.ClientSession, control_url: str) -> ReadyzAnswer | None:
    """Return the answer to `/readyz`, or None if there is none."""
    try:
        async with session.get(f"{control_url}/readyz", timeout=READYZ_TIMEOUT) as response:
            body = await response.content.read(MAX_READYZ_BYTES)
            return ReadyzAnswer(response.status == 200, describe(body), phase_of(body))
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


async def ask_alive(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether a liveness request is answered with 200 before the timeout."""
    try:
        async with session.get(url, timeout=READYZ_TIMEOUT) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def phase_of(body: bytes) -> str:
    try:
        return str(json.loads(body).get("phase", ""))
    except (ValueError, AttributeError):
        return ""


def describe(body: bytes) -> str:
    """Return phase and detail as text: `{"phase": "loading", "detail": "weights 40 %"}` is `loading weights 40 %`."""
    try:
        answer = json.loads(body)
        phase, detail = str(answer.get("phase", "")), str(answer.get("detail", ""))
    except (ValueError, AttributeError):
        return "not ready"
    if detail.startswith(phase):
        phase = ""
    return f"{phase} {detail}".strip()[:300] or "not ready"
