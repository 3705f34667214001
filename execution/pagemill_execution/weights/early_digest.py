"""Computes the digest of the weights on a thread while the process still imports its libraries.

Hashing releases the interpreter lock, so it costs nothing where a second core is idle; it also brings the file into the
page cache. Only GGUF files are digested early, of networks none: each of their ranks has connections of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from pagemill_execution.weights.digest import gguf_digest
from pagemill_models.files.gguf_file import GGUFFile
from pagemill_models.sources.by_parts import has_parts

logger = logging.getLogger(__name__)


class EarlyDigest:
    def __init__(self, find: Callable[[], Path]) -> None:
        """Start the thread. `find` returns the model's path; it is called on the thread and may wait for the path."""
        self._path: Path | None = None
        self._digest: str | None = None
        self._thread = threading.Thread(target=self._take, args=(find,), name="digest", daemon=True)
        self._thread.start()

    def of(self, path: Path) -> str | None:
        """Wait for the digest of `path`.

        Returns None if there is none; then the loader computes it or reports the fault.
        """
        self._thread.join()
        return self._digest if path == self._path else None

    def _take(self, find: Callable[[], Path]) -> None:
        try:
            path = find()
            if path.is_dir() or has_parts(path.parent):
                return
            self._digest = gguf_digest(GGUFFile(path))
            self._path = path
        except Exception:  # the loader will meet the same error and report it
            logger.debug("no early digest", exc_info=True)
