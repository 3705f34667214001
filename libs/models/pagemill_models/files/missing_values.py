"""Warnings about values that a model's files lack, once each in a process: files are read several times at a start."""

from __future__ import annotations

import logging
from functools import lru_cache

logger = logging.getLogger("pagemill.model_files")


@lru_cache(maxsize=1024)
def warn_once(message: str) -> None:
    """Log `message`, which names the file, the missing key, what is used in its place, and the remedy."""
    logger.warning("%s", message)
