"""The engine process as its parent starts it: before anything else, since its imports take longest.

While it imports, the parent imports its web framework and reads the tokenizer; the settings follow (`configure`) when
they are complete. The process holds a pipe from here and ends with it, so it never outlives its parent. Messages are
`ipc.channels`'s, the engine's end is `ipc.link`.
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
RUNNER_MODULE = "pagemill_engine.runner.load_cpu"
"""What a runner that computes imports; the null runner needs none of it."""


class EngineProcess:
    """A context manager: whatever happened, at its end the process is gone and its folder too."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.folder = folder
        """Private to parent and engine: settings, both sockets and the fatal message lie there."""
        self._process = process

    @classmethod
    def launch(cls, config: EngineConfig) -> EngineProcess:
        """Start it; of `config` it only learns what to import."""
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
        """Hand over the settings, once. A process that is gone already is found by `wait`."""
        (self.folder / SETTINGS_FILE).write_bytes(msgspec.json.encode(config))
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(CONFIGURED)

    def wait(self) -> int:
        """Block until it ends. Returns its exit code, negative for a signal."""
        return self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def discard(self) -> None:
        """End it if it runs and remove every trace. May be called again."""
        self.kill()
        self.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)
