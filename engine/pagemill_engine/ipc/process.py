"""Starts the engine process before everything else, since its imports take longest.

While it imports, the parent imports its web framework and reads the tokenizer; the settings follow (`configure`) when
they are complete. The process reads a pipe from its parent and ends with it, so it never outlives its parent. Messages
are sent by `ipc.channels`; the engine's end is `ipc.link`.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.folder import CONFIGURED, SETTINGS_FILE

ENGINE_MODULE = "pagemill_engine.loop.process"
RUNNER_MODULE = "pagemill_execution.starting.load_cpu"
"""Imports of a runner that computes; the null runner needs none of them."""


class EngineProcess:
    """An engine process. As a context manager it removes the process and its folder at the end."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.folder = folder
        """Private folder of parent and engine, with settings, both sockets and the fatal message."""
        self._process = process

    @classmethod
    def launch(cls, config: EngineConfig) -> EngineProcess:
        """Start the process. It learns from `config` only what to import."""
        folder = Path(tempfile.mkdtemp(prefix="pagemill-"))
        modules = [] if config.null_runner else [RUNNER_MODULE]
        argv = [sys.executable, "-m", ENGINE_MODULE, str(folder), *modules]
        try:
            return cls(subprocess.Popen(argv, stdin=subprocess.PIPE, bufsize=0), folder)
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    @property
    def pid(self) -> int:
        return self._process.pid

    def configure(self, config: EngineConfig) -> None:
        """Send the settings; call this once. If the process has ended, `wait` shows it."""
        (self.folder / SETTINGS_FILE).write_bytes(msgspec.json.encode(config))
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(CONFIGURED)

    def wait(self) -> int:
        """Wait for the process to end. Returns its exit code, negative for a signal."""
        return self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def discard(self) -> None:
        """End the process if it runs and remove its folder. May be called again."""
        self.kill()
        self.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)
