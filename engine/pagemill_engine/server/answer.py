"""The answer to one HTTP request's prompts: frames from the engine client's loop to the task that sends them.

`output.processor` renders before frames get here, so the buffer holds finished bytes. A slow reader never blocks the
engine: the engine client checks `too_far_behind` before it adds a frame, and ends a stream whose reader is. Only the
engine client adds frames; only the request's task takes them, or the link that the request came over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from pagemill_engine.output.processor import Frame, Processor
from pagemill_engine.server.metrics import RequestTiming
from pagemill_protocol.errors import PagemillError

MAX_UNREAD_BYTES = 16 * 1024 * 1024
"""Unread bytes at which a stream is ended: minutes of an ordinary one, seconds of 128 choices with logprobs."""


class Part(NamedTuple):
    """One prompt, as far as its answer has come."""

    processor: Processor
    timing: RequestTiming


class Answer:
    """Ends when every prompt's last frame was put, or when one of them failed."""

    def __init__(self, num_prompts: int = 1) -> None:
        self.error: PagemillError | None = None
        """The failure behind a frame with `meta.error`."""
        self.engine_ids: list[str] = []
        """Its prompts' names inside the engine."""
        self.parts: list[Part] = []
        """Of the prompts that the engine took."""
        self.on_change: Callable[[], None] | None = None
        """Called when frames have come, for a reader that waits in no task."""
        self._num_unfinished = num_prompts
        self._closed = False
        self._frames: list[Frame] = []
        self._num_unread_bytes = 0
        self._arrived = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Nothing more will be put."""
        return self._num_unfinished == 0 or self.error is not None or self._closed

    @property
    def is_read(self) -> bool:
        """Ended, and all frames were taken."""
        return self.ended and not self._frames

    @property
    def too_far_behind(self) -> bool:
        """More waits for the reader than a stream may hold."""
        return self._num_unread_bytes > MAX_UNREAD_BYTES

    def put(self, frames: list[Frame]) -> None:
        if self.ended or not frames:
            return
        self._frames += frames
        self._num_unread_bytes += sum(len(frame.payload) for frame in frames)
        self._num_unfinished -= sum(frame.meta.last for frame in frames)
        self._changed()

    def fail(self, error: PagemillError, frame: Frame) -> None:
        """The last frame: `error` in the client's dialect."""
        if self.ended:
            return
        self.error = error
        self._frames.append(frame)
        self._changed()

    def close(self) -> None:
        """The client is gone: drop all frames and wake the waiting task."""
        self._closed = True
        self._frames.clear()
        self._arrived.set()

    async def take(self) -> list[Frame]:
        """All frames that have arrived since the last call; waits for one. Empty once the answer has ended."""
        while not self._frames:
            if self.ended:
                return []
            self._arrived.clear()
            await self._arrived.wait()
        return self.take_now()

    def take_now(self) -> list[Frame]:
        """All frames that are there."""
        frames, self._frames = self._frames, []
        self._num_unread_bytes = 0
        return frames

    def _changed(self) -> None:
        self._arrived.set()
        if self.on_change is not None:
            self.on_change()
