"""A JSON file that another program replaces while the server runs, such as a mounted ConfigMap's.

It is read at the start and whenever its content has changed. One that is absent is empty; one that cannot be read
changes nothing. What its content means is for others: `adapters`, and the model's names in `main`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

logger = logging.getLogger(__name__)

CHECK_S = 1.0
"""Interval of checks whether the file has changed."""
MAX_FILE_BYTES = 4 * 1024 * 1024
T = TypeVar("T")


class FollowedFile(Generic[T]):
    def __init__(self, path: Path, kind: type[T], take: Callable[[T], None]) -> None:
        """`take` is called with each new content, a `kind`."""
        self._path, self._take = path, take
        self._decoder = msgspec.json.Decoder(kind)
        self._content: bytes | None = None
        """The content that was read last."""

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self.read()

    def read(self) -> None:
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            content = b"{}"
        except OSError as error:
            logger.warning("%s cannot be read: %s", self._path, error)
            return
        if content == self._content:
            return
        self._content = content
        try:
            if len(content) > MAX_FILE_BYTES:
                raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
            found = self._decoder.decode(content)
        except ValueError as error:
            logger.warning("%s cannot be used, what it said before stays: %s", self._path, error)
            return
        self._take(found)
