"""The engine process's end of the channel: a thread receives messages, the loop sends them.

The reader thread blocks on the socket, so an idle engine costs no CPU and decoding overlaps with the device. A second
thread reads the pipe from the parent: when the parent ends, for any reason, the pipe ends and so does this process. A
third one sends heartbeats, so that a long step is not taken for a stopped process. The parent's end is `ipc.channels`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.folder import FATAL_FILE, FROM_ENGINE, MAX_QUEUED, SETTINGS_FILE, TO_ENGINE, address
from pagemill_engine.ipc.messages import Fatal, FromEngine, Heartbeat, ToEngine

logger = logging.getLogger(__name__)

LINGER_MS = 1000
HEARTBEAT_S = 1.0
# Created here by one thread: if several threads decode a type for the first time at once, msgspec 0.22 reads a null
# pointer.
_settings_decoder = msgspec.json.Decoder(EngineConfig)
_message_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


class ParentLink:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = zmq.Context()
        self._outbox = self._connect_outbox(LINGER_MS)
        self._encoder = msgspec.msgpack.Encoder()
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._configured = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._read, name="inbox", daemon=True).start()
        threading.Thread(target=self._watch_parent, name="parent", daemon=True).start()

    def start_heartbeat(self, expected_step_ms: Callable[[], float]) -> None:
        """Send a heartbeat every second from now on. `expected_step_ms` is called on another thread."""
        threading.Thread(target=self._send_heartbeats, args=(expected_step_ms,), name="heartbeat", daemon=True).start()

    def settings(self) -> EngineConfig:
        """Wait for the parent's settings and return them."""
        self._configured.wait()
        return _settings_decoder.decode((self._folder / SETTINGS_FILE).read_bytes())

    def send(self, message: FromEngine) -> None:
        """Send a message; wait while the parent has `MAX_QUEUED` unread ones. Call this only on the thread that created
        the link.
        """
        self._outbox.send(self._encoder.encode(message))

    def receive(self, timeout_s: float | None) -> ToEngine | None:
        """Return the next message, or None after `timeout_s` seconds without one (0: do not wait)."""
        try:
            if timeout_s == 0:
                return self._inbox.get_nowait()
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def write_fatal(self, fatal: Fatal) -> None:
        """Write the last message to a file, which the parent reads when the process has ended."""
        draft = self._folder / f"{FATAL_FILE}.draft"
        with contextlib.suppress(OSError):
            draft.write_bytes(self._encoder.encode(fatal))
            draft.rename(self._folder / FATAL_FILE)

    def close(self) -> None:
        """Send queued messages, up to the linger time. The reader thread ends with the process."""
        self._outbox.close()

    def _read(self) -> None:
        self._configured.wait()  # the parent listens only now; an earlier connection would be retried much later
        inbox = self._context.socket(zmq.PULL)
        inbox.setsockopt(zmq.RCVHWM, 0)
        inbox.connect(address(self._folder, TO_ENGINE))
        while True:
            data = inbox.recv()
            try:
                self._inbox.put(_message_decoder.decode(data))
            except msgspec.DecodeError:
                logger.exception("dropped a message of %d bytes that is none of ours", len(data))

    def _connect_outbox(self, linger_ms: int) -> zmq.Socket[bytes]:
        """Return a new socket to the parent. Each thread needs its own."""
        outbox = self._context.socket(zmq.PUSH)
        outbox.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        outbox.setsockopt(zmq.LINGER, linger_ms)
        outbox.connect(address(self._folder, FROM_ENGINE))
        return outbox

    def _send_heartbeats(self, expected_step_ms: Callable[[], float]) -> None:
        outbox, encoder = self._connect_outbox(0), msgspec.msgpack.Encoder()
        while True:
            with contextlib.suppress(zmq.Again):  # heartbeats wait already, and one of them is enough
                outbox.send(encoder.encode(Heartbeat(expected_step_ms())), zmq.NOBLOCK)
            time.sleep(HEARTBEAT_S)

    def _watch_parent(self) -> None:
        while os.read(sys.stdin.fileno(), 1024):
            self._configured.set()
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)


def read_fatal(folder: Path) -> Fatal | None:
    """Return the engine process's last message, or None if it left none."""
    try:
        return msgspec.msgpack.decode((folder / FATAL_FILE).read_bytes(), type=Fatal)
    except (OSError, msgspec.DecodeError):
        return None
