"""The part of psutil that the engine needs without a device, for machines without it: the host's memory."""

from __future__ import annotations

import os
from typing import NamedTuple


class Memory(NamedTuple):
    total: int
    available: int


def virtual_memory() -> Memory:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return Memory(page_bytes * os.sysconf("SC_PHYS_PAGES"), page_bytes * os.sysconf("SC_AVPHYS_PAGES"))
