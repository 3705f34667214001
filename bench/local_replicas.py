"""Runs `pagemill up` as a process, finds its replicas in the process tree, checks which are ready, and kills one.

A replica is the engine's server and its child process; SIGKILL hits both, as the death of a container would.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
from processes import stop

ENGINE = "pagemill_engine.server"
START_TIMEOUT_S = 300.0
METRICS_TIMEOUT_S = 10.0
POLL_S = 0.05
NUM_ASKED = 5


class Replica(NamedTuple):
    name: str
    pid: int
    """Pid of the replica's server; it changes with a restart."""
    control_port: int

    @property
    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.control_port}/readyz", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def ready_since_s(self) -> float | None:
        """Return the monotonic time since which the replica is ready, by its own clock (`phase_s` of `/readyz`), or
        None.

        It is asked several times: the fastest answer is off by at most half of its duration.
        """
        asked = [self._ask_ready_since_s() for _ in range(NUM_ASKED)]
        known = [each for each in asked if each is not None]
        return min(known)[1] if known else None

    def _ask_ready_since_s(self) -> tuple[float, float] | None:
        """Return how long the request took, and the time since which the replica is ready by its answer."""
        asked_s = time.monotonic()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.control_port}/readyz", timeout=5) as response:
                reported = json.loads(response.read())
        except (urllib.error.URLError, OSError, ValueError):
            return None
        took_s = time.monotonic() - asked_s
        return took_s, asked_s + took_s / 2 - float(reported["phase_s"])

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(self.pid)
            for pid in [*(child.pid for child in server.children(recursive=True)), self.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Up(NamedTuple):
    process: subprocess.Popen[str]
    log: Path

    @property
    def url(self) -> str | None:
        """The gateway's base URL, once it is printed; else None."""
        found = re.search(r"^OpenAI base URL\s+(\S+)/v1", self.log.read_text(), re.MULTILINE)
        return found[1] if found else None

    @property
    def metrics_url(self) -> str | None:
        found = re.search(r"^Status, metrics\s.*?(\S+/metrics)", self.log.read_text(), re.MULTILINE)
        return found[1] if found else None

    @property
    def control_token_file(self) -> Path:
        """The file with the token of the control ports. Raise `RuntimeError` before it is printed."""
        found = re.search(r"^Control token\s+(\S+)", self.log.read_text(), re.MULTILINE)
        if found is None:
            raise RuntimeError("`pagemill up` has not shown the file of its control token yet")
        return Path(found[1])

    @property
    def control_token(self) -> str:
        return self.control_token_file.read_text().strip()

    def metrics(self) -> str:
        """Return the gateway's metrics. Raise `RuntimeError` before `pagemill up` has printed their address."""
        if self.metrics_url is None:
            raise RuntimeError("`pagemill up` has not shown the address of its metrics yet")
        asked = urllib.request.Request(self.metrics_url, headers={"Authorization": f"Bearer {self.control_token}"})
        with urllib.request.urlopen(asked, timeout=METRICS_TIMEOUT_S) as response:
            text: str = response.read().decode()
        return text

    def scalings(self, name: str) -> list[tuple[int, int]]:
        """Return the replicas before and after each of the autoscaler's changes so far."""
        reported = re.findall(rf"^{name}: scaled to (\d+) replicas from (\d+):", self.log.read_text(), re.MULTILINE)
        return [(int(before), int(after)) for after, before in reported]

    def replicas(self) -> dict[str, Replica]:
        """Return the replicas with a running process, by name."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                words = child.cmdline()
                if ENGINE in words:
                    settings = Path(words[words.index("--settings") + 1])
                    port = json.loads(settings.read_text())["server"]["control_port"]
                    found[settings.stem] = Replica(settings.stem, child.pid, port)
        return found

    def wait_ready(self, num_replicas: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the URL is printed and so many replicas are ready. Raise `TimeoutError`, or `RuntimeError` if it
        ended.
        """
        deadline = time.monotonic() + timeout_s
        while self.url is None or sum(each.ready for each in self.replicas().values()) < num_replicas:
            if self.process.poll() is not None:
                raise RuntimeError(f"`pagemill up` ended: {self.log.read_text()[-500:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not {num_replicas} replicas ready after {timeout_s:.0f} s")
            time.sleep(POLL_S)


@contextmanager
def pagemill_up(file: Path, log: Path) -> Iterator[Up]:
    """Serve a file of LLMDeployments on a free port while the block runs."""
    argv = [sys.executable, "-m", "pagemill", "up", "-f", str(file), "--port", "0", "--keep"]
    with log.open("w") as output:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True)
    try:
        yield Up(process, log)
    finally:
        stop(process)


@contextmanager
def serving(document: str, num_replicas: int) -> Iterator[tuple[Up, str]]:
    """Serve a document of LLMDeployments; yield the process and the gateway's base URL once so many replicas are ready.

    SIGTERM ends this process and those it started.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deployment.yaml"
        file.write_text(document)
        with pagemill_up(file, Path(folder) / "log") as up:
            up.wait_ready(num_replicas)
            assert up.url is not None
            yield up, up.url
