"""The process of one peer: started with a fresh log, asked by JSON lines or HTTP, paused, watched and ended.

It knows neither engines nor rows. Every failure of a process becomes a `PeerFailed` with its cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from processes import tree_memory

MEMORY_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 20.0


class PeerFailed(Exception):
    """Why a peer has no figure, in a few words for the table."""


class PeerProcess:
    """A process in a group of its own, so that pausing and ending it includes its children."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.started_s = time.perf_counter()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(self.why_ended()) from None
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next line of a worker."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerFailed(f"no answer in {timeout_s:.0f} s") from None
        if line is None:
            raise PeerFailed(self.why_ended())
        message: dict[str, Any] = json.loads(line)
        return message

    def wait_http(self, url: str, timeout_s: float) -> None:
        """Wait until a GET returns 200."""
        while not _answers(url):
            if self._process.poll() is not None:
                raise PeerFailed(self.why_ended())
            if time.perf_counter() - self.started_s > timeout_s:
                raise PeerFailed(f"not ready after {timeout_s:.0f} s")
            time.sleep(0.02)

    def output(self) -> str:
        """Return what a server has written to stdout so far. A worker's stdout is its protocol."""
        lines: list[str] = []
        while not self._lines.empty():
            lines.append(self._lines.get() or "")
        return "".join(lines)

    def why_ended(self) -> str:
        code = self._process.wait(timeout=STOP_TIMEOUT_S)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"ended with {how}: {lines[-1][:160]}" if lines else f"ended with {how}"

    def pause(self) -> None:
        """Stop the whole group: a resident peer must not use the cores on which another is measured."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the whole group, as a crash would."""
        with contextlib.suppress(ProcessLookupError):  # it has ended, and so have its children
            os.killpg(self.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
        try:
            self._process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(STOP_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class MemoryWatch:
    """The largest proportional set size of a process tree while the block runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_mib = 0.0

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._done.wait(MEMORY_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        try:
            self.peak_mib = max(self.peak_mib, tree_memory(self._pid).pss_mib)
        except psutil.NoSuchProcess:
            return


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
