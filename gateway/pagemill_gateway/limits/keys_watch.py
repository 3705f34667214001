"""Checks the file of API keys at an interval, so that logs, metrics and probes report an invalid file at once.

Workers authenticate requests with key rings of their own (`pagemill_protocol.keys.ring`), which read the file
themselves and log nothing about it.
"""

from __future__ import annotations

import asyncio
import logging

from pagemill_gateway.config import SettingsError, open_keys_file
from pagemill_protocol.secret_file import CHECK_INTERVAL_S, SecretFile

logger = logging.getLogger("pagemill.gateway.keys")


class KeysWatch:
    """Follows the file until `close`. Create it inside a running event loop."""

    def __init__(self, path: str) -> None:
        self.problem = ""
        """The error in the current file, because of which it is not used completely; empty if there is none."""
        self._path = path
        self._file: SecretFile | None = None
        self._look()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self._look()

    def _look(self) -> None:
        if self._file is None:
            self._open()
            return
        self._file.lines()
        self.problem = self._file.problem

    def _open(self) -> None:
        """Open the file. It may be invalid when this process starts as a replacement; workers keep the earlier keys."""
        try:
            self._file = open_keys_file(self._path)
        except SettingsError as error:
            if str(error) != self.problem:
                self.problem = str(error)
                logger.error("%s", error)
            return
        assert self._file is not None
        self.problem = self._file.problem
