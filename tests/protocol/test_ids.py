"""Request ids have one format and are unique, also across forked processes."""

from __future__ import annotations

import re
import subprocess
import sys

from pagemill_protocol.ids import new_id


def test_ids_are_128_bits_in_hex_and_differ() -> None:
    ids = [new_id() for _ in range(1000)]
    assert all(re.fullmatch(r"[0-9a-f]{32}", each) for each in ids)
    assert len(set(ids)) == len(ids)


FORKS = """
import os, sys
from pagemill_protocol.ids import new_id
new_id()
reader, writer = os.pipe()
for _ in range(2):
    if os.fork() == 0:
        os.write(writer, "".join(new_id() for _ in range(4)).encode())
        os._exit(0)
for _ in range(2):
    os.wait()
print(os.read(reader, 8 * 32).decode() + "".join(new_id() for _ in range(8)))
"""


def test_a_forked_process_generates_ids_of_its_own() -> None:
    """The forked process has no other threads, because it might wait for their locks forever."""
    drawn = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True).stdout.strip()
    assert len({drawn[at : at + 32] for at in range(0, len(drawn), 32)}) == 16
