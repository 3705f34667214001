"""The answer to one HTTP request: a buffer of frames between the engine client and the task that sends them.

`output.processor` renders before frames get here, so the buffer contains finished bytes. A slow reader never blocks the
engine: the engine client checks `exceeds_backlog` before it adds a frame, and ends the stream of such a reader. Only
the engine client adds frames. Only the request's task, or the link that the request came over, takes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from pagemill_engine.output.processor import Frame, Processor
from pagemill_engine.server.metrics import RequestTiming
from pagemill_protocol.errors import PagemillError

MAX_UNREAD_BYTES = 16 * 1024 * 1024
"""Unread bytes at which a stream is ended: minutes of an ordinary stream, seconds of 128 choices with logprobs."""


class PromptAnswer(NamedTuple):
    """The answer to one prompt so far."""

    processor: Processor
    timing: RequestTiming


class Answer:
    """The answer to one HTTP request. It ends when every prompt's last frame was added, or when one prompt failed."""

    def __init__(self, num_prompts: int = 1) -> None:
        self.error: PagemillError | None = None
        """The error that the last frame reports in the client's dialect."""
        self.engine_ids: list[str] = []
        """Ids of the request's prompts inside the engine."""
        self.parts: list[PromptAnswer] = []
        """One part for each prompt that the engine accepted."""
        self.on_change: Callable[[], None] | None = None
        """Callback for added frames, for a reader that does not wait in a task."""
        self._num_unfinished = num_prompts
        self._closed = False
        self._frames: list[Frame] = []
        self._num_unread_bytes = 0
        self._arrived = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether no more frames will be added."""
        return self._num_unfinished == 0 or self.error is not None or self._closed

    @property
    def is_read(self) -> bool:
        """Whether the answer has ended and all frames were taken."""
        return self.ended and not self._frames

    @property
    def exceeds_backlog(self) -> bool:
        """Whether more than `MAX_UNREAD_BYTES` wait for the reader."""
        return self._num_unread_bytes > MAX_UNREAD_BYTES

    def put(self, frames: list[Frame]) -> None:
        if self.ended or not frames:
            return
        self._frames += frames
        self._num_unread_bytes += sum(len(frame.payload) for frame in frames)
        self._num_unfinished -= sum(frame.meta.last for frame in frames)
        self._changed()

    def fail(self, error: PagemillError, frame: Frame) -> None:
        """End the answer with `frame`, which is `error` in the client's dialect."""
        if self.ended:
            return
        self.error = error
        self._frames.append(frame)
        self._changed()

    def close(self) -> None:
        """Drop all frames and wake the waiting task, because the client has disconnected."""
        self._closed = True
        self._frames.clear()
        self._arrived.set()

    async def take(self) -> list[Frame]:
        """Wait for frames and return all that have arrived. Returns an empty list once the answer has ended."""
        while not self._frames:
            if self.ended:
                return []
            self._arrived.clear()
            await self._arrived.wait()
        return self.get_nowait()

    def get_nowait(self) -> list[Frame]:
        """Return all frames that have arrived, without waiting."""
        frames, self._frames = self._frames, []
        self._num_unread_bytes = 0
        return frames

    def _changed(self) -> None:
        self._arrived.set()
        if self.on_change is not None:
            self.on_change()
