"""Follows the file of API keys for logs, metrics and probes, so that a wrong file is reported before a request comes.

Requests are authenticated by the rings of the workers (`pagemill_protocol.keys.ring`), which read the file themselves
and log nothing about it.
"""

from __future__ import annotations

import asyncio
import logging

from pagemill_gateway.config import SettingsError, open_keys_file
from pagemill_protocol.secret_file import CHECK_INTERVAL_S, SecretFile

logger = logging.getLogger("pagemill.gateway.keys")


class KeysWatch:
    """Create inside a running event loop."""

    def __init__(self, path: str) -> None:
        self.problem = ""
        """Why the file as it is now is not used, or not all of it; empty when it is."""
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
        """A replaced process may find a file that no line of can be used: the workers still know the keys of before."""
        try:
            self._file = open_keys_file(self._path)
        except SettingsError as error:
            if str(error) != self.problem:
                self.problem = str(error)
                logger.error("%s", error)
            return
        assert self._file is not None
        self.problem = self._file.problem
