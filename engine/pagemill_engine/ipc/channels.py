"""The HTTP process's end: starts the engine process, exchanges messages with it, and knows at once when it dies.

msgpack over two zmq sockets in a private folder. The engine process holds a pipe from here, so it never outlives this
process. Neither side pickles anything. The engine's end is `ipc.link`; what is said is `ipc.messages`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.link import FROM_ENGINE, SETTINGS_FILE, TO_ENGINE, LinkSettings, address, read_fatal
from pagemill_engine.ipc.messages import FromEngine, Shutdown, ToEngine

logger = logging.getLogger(__name__)

ENGINE_MODULE = "pagemill_engine.loop.process"
STOP_TIMEOUT_S = 5.0
"""After `Shutdown` the engine process has this long before it is killed."""


class EngineDied(ConnectionError):
    """The engine process ended and said nothing more."""

    def __init__(self, returncode: int) -> None:
        super().__init__(_describe_exit(returncode))
        self.returncode = returncode


class EngineChannel:
    """One engine process. All methods belong to the event loop that called `start`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._inbox: asyncio.Queue[FromEngine | EngineDied] = asyncio.Queue()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._folder: Path | None = None
        self._descriptor: int | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._died: EngineDied | None = None

    @property
    def pid(self) -> int | None:
        """The engine process, while there is one."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the engine process; its `LoadProgress` messages follow. A start that fails leaves nothing behind."""
        self._folder = Path(tempfile.mkdtemp(prefix="pagemill-"))
        self._context = zmq.Context()
        try:
            self._process = await self._spawn(self._folder)
        except Exception:
            if self._descriptor is not None:
                asyncio.get_running_loop().remove_reader(self._descriptor)
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._watcher = asyncio.create_task(self._watch(self._process))

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks. Ignored when the engine process is gone: `recv` tells of that."""
        if self._died is None:
            self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def recv(self) -> FromEngine:
        """The next message. Raises `EngineDied` (a `ConnectionError`) once the process ended; `Fatal` comes first."""
        if self._died is not None and self._inbox.empty():
            raise self._died
        message = await self._inbox.get()
        if isinstance(message, EngineDied):
            raise message
        return message

    async def close(self) -> None:
        """End the engine process, by force if it does not end by itself, and remove every trace."""
        if self._process is None or self._watcher is None:
            return
        try:
            self.send(Shutdown())
        except zmq.Again:  # it has not even connected yet: nobody would read the message
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        try:
            await asyncio.wait_for(asyncio.shield(self._watcher), STOP_TIMEOUT_S)
        except TimeoutError:
            logger.warning("engine process %d did not stop; killing it", self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._watcher
        self._close_sockets()

    async def _spawn(self, folder: Path) -> asyncio.subprocess.Process:
        settings = folder / SETTINGS_FILE
        settings.write_bytes(msgspec.json.encode(LinkSettings(engine=self._config, folder=str(folder))))
        self._open_sockets(folder)
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", ENGINE_MODULE, str(settings), stdin=asyncio.subprocess.PIPE
        )

    def _open_sockets(self, folder: Path) -> None:
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._outbox.setsockopt(zmq.LINGER, 0)
        self._outbox.bind(address(folder, TO_ENGINE))
        self._source = self._context.socket(zmq.PULL)
        self._source.setsockopt(zmq.RCVHWM, 0)
        self._source.bind(address(folder, FROM_ENGINE))
        self._descriptor = int(self._source.getsockopt(zmq.FD))
        asyncio.get_running_loop().add_reader(self._descriptor, self._drain)

    def _close_sockets(self) -> None:
        if self._source.closed:
            return
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._source.close()
        self._outbox.close(linger=0)
        self._context.term()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _drain(self) -> None:
        """The socket's descriptor signals changes, not messages: read until there is nothing."""
        while True:
            try:
                data = self._source.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._inbox.put_nowait(self._decoder.decode(data))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        returncode = await process.wait()
        if not self._source.closed:
            self._drain()
        fatal = read_fatal(self._folder) if self._folder is not None else None
        if fatal is not None:
            self._inbox.put_nowait(fatal)
        self._died = EngineDied(returncode)
        self._inbox.put_nowait(self._died)


def _describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-returncode).name
        hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"killed by signal {-returncode}"
