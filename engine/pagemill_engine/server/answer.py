"""The answer to one HTTP request: a buffer of frames between the engine client and the task that sends them.

`output.processor` renders before frames get here, so the buffer contains finished bytes. A slow reader never blocks the
engine: the engine client ends the stream of a reader that leaves too much (`exceeds_backlog`), and the slowest readers
when all answers together hold too much (`unread`). Only the engine client adds frames. Only the request's task, or the
link that the request came over, takes them, a bounded number of bytes at a time: what was not taken stays counted.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pagemill_engine.output.processor import Frame, Processor
from pagemill_engine.server.metrics import RequestTiming
from pagemill_engine.server.unread import UnreadAnswers
from pagemill_protocol.errors import PagemillError

MAX_UNREAD_BYTES = 16 * 1024 * 1024
"""Unread bytes at which a stream is ended: minutes of an ordinary stream, seconds of 128 choices with logprobs."""
FRAME_BYTES = 512
"""Memory of a frame beside its payload."""
TAKEN_BYTES = 64 * 1024
"""Bytes of frames that a reader takes at once, unless the first frame alone has more."""


class PromptAnswer(NamedTuple):
    """The answer to one prompt so far."""

    processor: Processor
    timing: RequestTiming


class Answer:
    """The answer to one HTTP request. It ends when every prompt's last frame was added, or when one prompt failed."""

    def __init__(self, num_prompts: int = 1, unread: UnreadAnswers | None = None, *, only_bodies: bool = False) -> None:
        """`only_bodies`: the reader wants no frames but the last one of each prompt."""
        self.error: PagemillError | None = None
        """The error that the last frame reports in the client's dialect."""
        self.engine_ids: list[str] = []
        """Ids of the request's prompts inside the engine."""
        self.parts: list[PromptAnswer] = []
        """One part for each prompt that the engine accepted."""
        self.on_change: Callable[[], None] | None = None
        """Callback for added frames, for a reader that does not wait in a task."""
        self.num_held_bytes = self.num_unread_bytes = 0
        self.read_at = time.monotonic()
        self._unread = UnreadAnswers() if unread is None else unread
        self._only_bodies = only_bodies
        self._num_unfinished = num_prompts
        self._closed = False
        self._is_cut = False
        self._frames: list[Frame] = []
        self._has_rest = False
        """Whether one of `_frames` has further pieces."""
        self._pieces: deque[bytes] = deque()
        """The rest of the frame that was taken last."""
        self._num_piece_bytes = self._num_left_bytes = 0
        """Memory of `_pieces`, and the bytes that they are for the reader."""
        self._arrived = asyncio.Event()
        self._unread.add(self)

    @property
    def ended(self) -> bool:
        """Whether no more frames will be added."""
        return self._num_unfinished == 0 or self.error is not None or self._closed

    @property
    def is_read(self) -> bool:
        """Whether the answer has ended and all of it was taken."""
        return self.ended and not self._frames and not self._pieces

    @property
    def is_within_frame(self) -> bool:
        """Whether `next_piece` has a piece."""
        return bool(self._pieces)

    @property
    def is_cut(self) -> bool:
        """Whether it ended within a frame, the rest of which was dropped."""
        return self._is_cut

    @property
    def exceeds_backlog(self) -> bool:
        """Whether more than `MAX_UNREAD_BYTES` wait for the reader."""
        return self.num_unread_bytes > MAX_UNREAD_BYTES

    def put(self, frames: Sequence[Frame]) -> None:
        if self._only_bodies:
            frames = [frame for frame in frames if frame.meta.last]
        if not frames or self.ended:
            return
        self._frames += frames
        for frame in frames:
            self._add(frame)
            if frame.meta.last:
                self._num_unfinished -= 1
        self._changed()

    def collect(self, change: int) -> None:
        """Count bytes that are kept for a body and not in a frame yet, or no longer."""
        if not self._closed:
            self.num_held_bytes += change
            self._unread.num_bytes += change

    def fail(self, error: PagemillError, frame: Frame) -> None:
        """End the answer with `frame`, which is `error` in the client's dialect, after what is unread."""
        if self.ended:
            return
        self.error = error
        self._frames.append(frame)
        self._add(frame)
        self._changed()

    def cut(self, error: PagemillError, frame: Frame) -> None:
        """End the answer with `frame` in place of all that is unread, also if it has ended before."""
        if self._closed or self.error is not None:
            return
        self.error = error
        self._is_cut = bool(self._pieces)
        self._drop()
        if not self._is_cut:
            self._frames.append(frame)
            self._add(frame)
        self._changed()

    def close(self) -> None:
        """Drop all frames and wake the waiting task, because the client has disconnected."""
        self._closed = True
        self._drop()
        self._arrived.set()

    async def take(self, most_bytes: int = TAKEN_BYTES) -> list[Frame]:
        """Wait for frames and return the next ones, like `get_nowait`. Returns an empty list once the answer has
        ended."""
        while not self._frames:
            if self.ended:
                return []
            self._arrived.clear()
            await self._arrived.wait()
        return self.get_nowait(most_bytes)

    async def wait_end(self) -> None:
        """Wait until the answer has ended, without taking anything."""
        while not self.ended:
            self._arrived.clear()
            await self._arrived.wait()

    def get_nowait(self, most_bytes: int = TAKEN_BYTES) -> list[Frame]:
        """Return the frames that have arrived, without waiting: as many as hold `most_bytes`, but one at least.

        After a frame with further pieces no other is returned, until `next_piece` has returned them all.
        """
        self.read_at = time.monotonic()
        if self._pieces or not self._frames:
            return []
        if self.num_unread_bytes <= most_bytes and not self._has_rest:
            taken, self._frames = self._frames, []
            self._count_unread(-self.num_unread_bytes)
            return taken
        return self._take_some(most_bytes)

    def _take_some(self, most_bytes: int) -> list[Frame]:
        num_frames = num_bytes = 0
        for frame in self._frames:
            num_frames += 1
            num_bytes += FRAME_BYTES + len(frame.payload)
            if frame.rest:
                self._begin_pieces(frame.rest)
            if frame.rest or num_bytes >= most_bytes:
                break
        taken = self._frames[:num_frames]
        del self._frames[:num_frames]
        self._count_unread(-num_bytes)
        return taken

    def next_piece(self) -> bytes | None:
        """Return the next piece of the frame that was taken last, or None after its end."""
        if not self._pieces:
            return None
        self.read_at = time.monotonic()
        piece = self._pieces.popleft()
        # A piece that occurs several times is held once, so each occurrence frees its share.
        freed = self._num_piece_bytes * len(piece) // max(1, self._num_left_bytes) if self._pieces else None
        self._num_left_bytes -= len(piece)
        self._free_pieces(self._num_piece_bytes if freed is None else freed)
        return piece

    def take_bodies(self) -> list[bytes]:
        """Return the body of each prompt, in no order. They stay counted until `replace`."""
        bodies = [b"".join((frame.payload, *frame.rest)) for frame in self._frames]
        self._frames.clear()
        return bodies

    def replace(self, pieces: Sequence[bytes]) -> None:
        """Let the reader take these pieces: one body made of several."""
        if not self._closed and self.error is None:
            self._drop()
            self._begin_pieces(pieces)
            self._count_unread(self._num_piece_bytes)

    def _begin_pieces(self, pieces: Sequence[bytes]) -> None:
        self._pieces.extend(pieces)
        self._num_piece_bytes, self._num_left_bytes = _held_pieces(pieces), sum(map(len, pieces))

    def _free_pieces(self, num_bytes: int) -> None:
        self._num_piece_bytes -= num_bytes
        self._count_unread(-num_bytes)

    def _add(self, frame: Frame) -> None:
        num_bytes = FRAME_BYTES + len(frame.payload)
        if frame.rest:
            self._has_rest = True
            num_bytes += _held_pieces(frame.rest)
        self._count_unread(num_bytes)

    def _count_unread(self, change: int) -> None:
        self.num_unread_bytes += change
        self.num_held_bytes += change
        self._unread.num_bytes += change

    def _drop(self) -> None:
        self._frames.clear()
        self._pieces.clear()
        self._unread.num_bytes -= self.num_held_bytes
        self.num_held_bytes = self.num_unread_bytes = self._num_piece_bytes = 0

    def _changed(self) -> None:
        self._arrived.set()
        if self.on_change is not None:
            self.on_change()


def _held_pieces(pieces: Iterable[bytes]) -> int:
    return sum(map(len, {id(piece): piece for piece in pieces}.values()))
