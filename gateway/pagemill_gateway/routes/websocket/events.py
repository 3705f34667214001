"""Server-sent events as WebSocket messages: each message is the data of one event.

An event may arrive in parts, and its message is then sent in parts, so that a large one is never held as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_END = b"\n\n"
_DATA = b"data: "


class MessagePart(NamedTuple):
    data: bytes
    is_first: bool
    is_last: bool


class EventMessages:
    def __init__(self) -> None:
        self._rest = b""
        self._is_within = False
        """Whether the beginning of a message was returned and its end was not."""
        self._has_data = False

    @property
    def is_within(self) -> bool:
        return self._is_within

    def push(self, data: bytes) -> Iterator[MessagePart | None]:
        """Yield the parts of messages in the next bytes of a stream; None for a comment."""
        rest = self._rest + data if self._rest else data
        while rest:
            if not self._has_data:
                end, begin = rest.find(_END), rest.find(_DATA)
                if rest.startswith(b":") and end >= 0:
                    yield None
                    rest = rest[end + len(_END) :]
                    continue
                if rest.startswith(b":") or begin < 0:
                    break
                self._has_data = True
                rest = rest[begin + len(_DATA) :]
            end = rest.find(_END)
            is_last = end >= 0
            if not is_last:  # the last byte may be the first of the two that end the event
                end = len(rest) - rest.endswith(b"\n")
            if end or is_last:
                yield MessagePart(rest[:end], not self._is_within, is_last)
                self._is_within = not is_last
            rest = rest[end + len(_END) :] if is_last else rest[end:]
            if not is_last:
                break
            self._has_data = False
        self._rest = rest
