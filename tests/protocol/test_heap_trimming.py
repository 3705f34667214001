"""Freed memory returns to the system: when much is free and the process has grown since the last time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagemill_servers.process import malloc
from pagemill_servers.process.malloc import LEAST_FREE_BYTES, LEAST_GROWTH_BYTES, HeapTrimmer

HELD_BETWEEN = """
import time
from pathlib import Path
from pagemill_servers.process.malloc import keep_trimmed

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) / 256

keep_trimmed(0.05)
before = resident_mib()
# What stays between the freed blocks keeps the heap from shrinking by itself.
blocks = [(bytearray(50_000), bytearray(600)) for _ in range(4000)]
full = resident_mib()
blocks = [small for _, small in blocks]
until = time.monotonic() + 60
while resident_mib() > before + 60 and time.monotonic() < until:
    time.sleep(0.05)
print(full - before, resident_mib() - before, len(blocks))
"""


def test_blocks_that_were_freed_between_others_return_to_the_system() -> None:
    output = subprocess.run([sys.executable, "-c", HELD_BETWEEN], check=True, stdout=subprocess.PIPE, text=True).stdout
    full_mib, left_mib, _ = map(float, output.split())
    assert full_mib > 180
    assert left_mib < 60


def test_the_heap_is_trimmed_only_if_much_is_free_and_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    free, resident, trims = 0, 10 * LEAST_GROWTH_BYTES, []
    monkeypatch.setattr(malloc, "trim_heap", lambda: trims.append(resident))
    trimmer = HeapTrimmer(lambda: free, lambda: resident)
    assert not trimmer.trim_if_due()
    free = LEAST_FREE_BYTES
    assert trimmer.trim_if_due()
    assert not trimmer.trim_if_due(), "what was trimmed still counts as free"
    resident += LEAST_GROWTH_BYTES
    assert trimmer.trim_if_due()
    assert len(trims) == 2
