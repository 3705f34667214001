"""The HTTP process's end of the channel: sends settings, exchanges messages, and detects the engine process's death.

Messages are msgpack over two zmq sockets in the process's private folder; neither side pickles anything. `ipc.process`
starts the process, `ipc.link` is the engine's end, `ipc.messages` defines the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections import deque

import msgspec
import zmq

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.folder import FROM_ENGINE, MAX_QUEUED, TO_ENGINE, address
from pagemill_engine.ipc.link import read_fatal
from pagemill_engine.ipc.messages import FromEngine, Shutdown, ToEngine
from pagemill_engine.ipc.process import EngineProcess

logger = logging.getLogger(__name__)

CONNECTING_S = 0.002
"""Interval of checks whether the engine process has connected."""
MAX_WAITING = 16
"""Maximum number of decoded messages that wait for `recv`. Decoded outputs take several times the memory of encoded
ones, so the others wait encoded, at the sockets.
"""
STOP_TIMEOUT_S = 5.0
"""Time between `Shutdown` and killing the engine process."""


class EngineDied(ConnectionError):
    """The engine process ended without a `Fatal` message."""

    def __init__(self, returncode: int) -> None:
        super().__init__(_describe_exit(returncode))
        self.returncode = returncode

    @property
    def was_killed(self) -> bool:
        """Whether it was killed from outside: by the kernel for lack of memory, or by a person.

        All other deaths are its own fault.
        """
        return self.returncode in (-signal.SIGKILL, -signal.SIGTERM)


class EngineChannel:
    """Channel to one engine process. Call its methods only on the event loop that called `start`."""

    def __init__(self, config: EngineConfig, process: EngineProcess) -> None:
        self._config = config
        self._process = process
        self._inbox: asyncio.Queue[FromEngine | EngineDied] = asyncio.Queue()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._descriptor: int | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._died: EngineDied | None = None
        self._is_paused = False
        """Whether the socket is not read, because `MAX_WAITING` messages wait."""
        self._reads_all = False
        """Whether every message is read at once: the engine process stops, and must not wait for a reader."""
        self._unsent: deque[bytes] = deque()
        """Encoded messages from before the engine process has connected."""

    @property
    def pid(self) -> int:
        """Process id of the engine process."""
        return self._process.pid

    async def start(self) -> None:
        """Let the engine process load the model; its `LoadProgress` messages follow.

        A start that fails removes sockets and process.
        """
        self._context = zmq.Context()
        try:
            self._open_sockets()
            self._process.configure(self._config)
        except Exception:
            if self._descriptor is not None:
                asyncio.get_running_loop().remove_reader(self._descriptor)
            self._context.destroy(linger=0)
            self._process.discard()
            raise
        self._watcher = asyncio.create_task(self._watch())

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks. Ignored if the engine process has ended, which `recv` reports."""
        if self._died is not None:
            return
        data = self._encoder.encode(message)
        try:
            if not self._unsent:
                self._outbox.send(data, zmq.NOBLOCK)
                return
        except zmq.Again:  # the engine may be ready before its socket has connected
            asyncio.get_running_loop().call_later(CONNECTING_S, self._send_again)
        self._unsent.append(data)

    def _send_again(self) -> None:
        while self._unsent and self._died is None and not self._outbox.closed:
            try:
                self._outbox.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                asyncio.get_running_loop().call_later(CONNECTING_S, self._send_again)
                return
            self._unsent.popleft()

    async def recv(self) -> FromEngine:
        """Return the next message.

        Raises `EngineDied` (a `ConnectionError`) once the process ended; `Fatal` comes first.
        """
        if self._died is not None and self._inbox.empty():
            raise self._died
        message = await self._inbox.get()
        if self._is_paused and self._inbox.qsize() <= MAX_WAITING // 2:
            self._resume()
        if isinstance(message, EngineDied):
            raise message
        return message

    def terminate(self) -> None:
        """Terminate the engine process without a message: while it loads it reads none."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the engine process, even if it is stopped, so that `close` does not wait for it."""
        self._process.kill()

    def discard(self) -> None:
        """Kill the engine process and remove its sockets and folder, for callers that cannot wait."""
        self._process.kill()
        if self._watcher is not None:
            self._watcher.cancel()
            self._close_sockets()
        self._process.discard()

    async def close(self) -> None:
        """End the engine process, by force after `STOP_TIMEOUT_S`, and remove its sockets and folder."""
        if self._watcher is None:
            self._process.discard()
            return
        self._reads_all = True
        self._resume()
        try:
            if self._died is None:
                self._outbox.send(self._encoder.encode(Shutdown()), zmq.NOBLOCK)
        except zmq.Again:  # it has not connected yet, so the message would not be read
            self._process.terminate()
        try:
            await asyncio.wait_for(asyncio.shield(self._watcher), STOP_TIMEOUT_S)
        except TimeoutError:
            logger.warning("engine process %d did not stop; killing it", self._process.pid)
            self._process.kill()
            await self._watcher
        self._close_sockets()

    def _open_sockets(self) -> None:
        folder = self._process.folder
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._outbox.setsockopt(zmq.LINGER, 0)
        self._outbox.bind(address(folder, TO_ENGINE))
        self._source = self._context.socket(zmq.PULL)
        self._source.setsockopt(zmq.RCVHWM, MAX_QUEUED)
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
        self._process.discard()

    def _drain(self) -> None:
        """Read all messages, up to `MAX_WAITING`. The socket's descriptor signals changes, not messages."""
        while self._reads_all or self._inbox.qsize() < MAX_WAITING:
            try:
                data = self._source.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._inbox.put_nowait(self._decoder.decode(data))
        if not self._is_paused and self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._is_paused = True

    def _resume(self) -> None:
        if self._is_paused and not self._source.closed and self._descriptor is not None:
            self._is_paused = False
            asyncio.get_running_loop().add_reader(self._descriptor, self._drain)
            self._drain()

    async def _watch(self) -> None:
        returncode = await self._end()
        self._reads_all = True
        if not self._source.closed:
            self._drain()
        fatal = read_fatal(self._process.folder)
        if fatal is not None:
            self._inbox.put_nowait(fatal)
        self._died = EngineDied(returncode)
        self._inbox.put_nowait(self._died)

    def _end(self) -> asyncio.Future[int]:
        """Return a future of the exit code, which a thread waits for."""
        loop = asyncio.get_running_loop()
        end = loop.create_future()

        def finish(returncode: int) -> None:
            if not end.done():
                end.set_result(returncode)

        def wait() -> None:
            returncode = self._process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no receiver
                loop.call_soon_threadsafe(finish, returncode)

        threading.Thread(target=wait, name="engine-end", daemon=True).start()
        return end


def _describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-returncode).name
        hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"killed by signal {-returncode}"
