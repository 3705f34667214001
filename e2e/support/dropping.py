"""Drops packets in the network namespaces of pods, so that this works with any pod network.

Connections are neither reset nor closed, as with a wrong NetworkPolicy or a partition.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from support.processes import of_pod

TABLE = "pagemill-e2e-dropping"


@contextmanager
def dropping(pods: Iterable[dict[str, Any]], program: str, *, sent: str, received: str = "") -> Iterator[None]:
    """Drop what matches while the block runs. `sent`, `received`: expressions of nftables, such as `tcp dport 80`."""
    # An open file keeps the namespace accessible if its process is replaced meanwhile.
    spaces = [os.open(f"/proc/{of_pod(pod, program)[0].pid}/ns/net", os.O_RDONLY) for pod in pods]
    try:
        for space in spaces:
            _nft(space, _table(output=sent, input=received))
        yield
    finally:
        for space in spaces:
            _nft(space, f"table inet {TABLE}\ndelete table inet {TABLE}")
            os.close(space)


def _table(**rules: str) -> str:
    chains = [
        f"chain {hook} {{ type filter hook {hook} priority -10; policy accept; {rule} drop; }}"
        for hook, rule in rules.items()
        if rule
    ]
    return f"table inet {TABLE} {{\n" + "\n".join(chains) + "\n}"


def _nft(space: int, script: str) -> None:
    argv = ["nsenter", f"--net=/proc/self/fd/{space}", "nft", "-f", "-"]
    done = subprocess.run(argv, input=script, capture_output=True, text=True, timeout=30, pass_fds=[space])
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}\n{script}"
