"""Cuts off the load stream: operators receive no gateway reports any more, and everything else continues.

Packets are dropped in the pods' own network namespaces, so this works with any pod network. The connections are neither
reset nor closed, as with a wrong NetworkPolicy or a partition.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from support.processes import of_pod

CONTROL_PORT = 8081
"""The gateways' control port, by the chart's default."""
TABLE = "pagemill-e2e-load-stream"
RULES = f"""table inet {TABLE} {{
    chain output {{
        type filter hook output priority -10; policy accept;
        tcp dport {CONTROL_PORT} drop
    }}
}}"""


@contextmanager
def cut(pods: Iterable[dict[str, Any]], program: str = "pagemill_operator") -> Iterator[None]:
    """Drop what these pods send to the control port of any gateway while the block runs."""
    # An open file keeps the namespace accessible if its process is replaced meanwhile.
    spaces = [os.open(f"/proc/{of_pod(pod, program)[0].pid}/ns/net", os.O_RDONLY) for pod in pods]
    try:
        for space in spaces:
            _nft(space, RULES)
        yield
    finally:
        for space in spaces:
            _nft(space, f"table inet {TABLE}\ndelete table inet {TABLE}")
            os.close(space)


def _nft(space: int, script: str) -> None:
    argv = ["nsenter", f"--net=/proc/self/fd/{space}", "nft", "-f", "-"]
    done = subprocess.run(argv, input=script, capture_output=True, text=True, timeout=30, pass_fds=[space])
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}\n{script}"
