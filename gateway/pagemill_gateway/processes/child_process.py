"""Keeps one process of a gateway running: starts it, and replaces it when it exits or hangs, until it is stopped.

A process hangs if its event loop sends no heartbeat for `hang_timeout_s`, because of a deadlock, a stop signal or an
endless loop. Only time in which this process itself runs counts, because a suspended machine stops both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import sys
from collections.abc import Callable

import msgspec

from pagemill_gateway.processes.child import HEARTBEAT_INTERVAL_S, READY, Setup, encode_setup

logger = logging.getLogger("pagemill.gateway.supervisor")

PAUSE_FIRST_S = 0.05
PAUSE_LONGEST_S = 5.0
"""First and longest pause before a process is replaced; it doubles if the process ran less than `STABLE_AFTER_S`."""
STABLE_AFTER_S = 10.0
START_TIMEOUT_S = 120.0
"""The timeout of imports and settings, before the event loop runs."""


class ChildProcess:
    def __init__(self, setup: Setup, on_ready: Callable[[ChildProcess], None]) -> None:
        self.name = setup.name
        self.ready = asyncio.Event()
        """Set while the process serves."""
        self.wanted = True
        """Whether the process is replaced when it exits."""
        self._setup = setup
        self._on_ready = on_ready
        self._was_ready = False
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> bool:
        """Run the process until it exits and is not wanted. Return whether it has ever served."""
        loop = asyncio.get_running_loop()
        pause_s = PAUSE_FIRST_S
        while self.wanted:
            started_at = loop.time()
            code = await self._run_once()
            self._was_ready = self._was_ready or self.ready.is_set()
            self.ready.clear()
            if not self._was_ready:
                break
            if loop.time() - started_at > STABLE_AFTER_S:
                pause_s = PAUSE_FIRST_S
            if self.wanted:
                logger.warning("%s ended (%s) and is replaced", self.name, _describe(code))
                await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_LONGEST_S, pause_s * 2)
            self._setup = msgspec.structs.replace(self._setup, restarts=self._setup.restarts + 1)
        return self._was_ready

    def ask_to_stop(self) -> None:
        """Send a stop signal. A process that does not serve yet exits at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.wanted = False
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _run_once(self) -> int:
        """Run the process once. Return its exit code, negative for a signal."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pagemill_gateway.processes",
            self.name,  # shown in process lists
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self._setup.listener,),
            start_new_session=True,  # a terminal's Ctrl-C is for the supervisor alone
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(encode_setup(self._setup))
                await process.stdin.drain()
            await self._listen(process.stdout, process)
            return await process.wait()
        finally:
            self._process = None
            process.stdin.close()

    async def _listen(self, output: asyncio.StreamReader, process: asyncio.subprocess.Process) -> None:
        """Read the process's heartbeats until it exits; kill it if it sends none for too long."""
        silent_s, patience_s = 0.0, max(START_TIMEOUT_S, self._setup.config.hang_timeout_s)
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_INTERVAL_S):
                    line = await output.readline()
            except TimeoutError:
                silent_s += HEARTBEAT_INTERVAL_S
                if silent_s >= patience_s:
                    logger.error("%s has said nothing for %.0f s and is killed", self.name, silent_s)
                    process.kill()
                    patience_s = math.inf
                continue
            if not line:
                return
            silent_s, patience_s = 0.0, self._setup.config.hang_timeout_s
            if line == READY:
                self.ready.set()
                self._on_ready(self)


def _describe(code: int) -> str:
    with contextlib.suppress(ValueError):
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
