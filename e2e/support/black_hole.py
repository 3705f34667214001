"""Drops all packets of a pod's connections to the API server, which stay open on both ends. New connections work.

A lost NAT entry or a failed load balancer has the same effect: no reset and no end of the connection.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.processes import of_pod

API_PORTS = {443, 6443}
ESTABLISHED = "01"
TABLE = "pagemill-e2e-black-hole"


@contextmanager
def swallowed(pods: Iterable[dict[str, Any]], program: str) -> Iterator[int]:
    """Drop what these pods' open API connections send and receive while the block runs; yield their number."""
    rules, count = [], 0
    for pod in pods:
        ports = _local_ports(of_pod(pod, program)[0].pid)
        count += len(ports)
        address, listed = pod["status"]["podIP"], ", ".join(map(str, sorted(ports)))
        if ports:
            rules.append(("input", f"ip saddr {address} tcp sport {{ {listed} }} drop"))
            rules.append(("output", f"ip daddr {address} tcp dport {{ {listed} }} drop"))
    _nft(_table(rules))
    try:
        yield count
    finally:
        _nft(f"delete table inet {TABLE}")


def _table(rules: list[tuple[str, str]]) -> str:
    chains = []
    for hook in ("input", "output"):
        lines = "\n".join(rule for where, rule in rules if where == hook)
        chains.append(f"chain {hook} {{ type filter hook {hook} priority -10; policy accept;\n{lines}\n}}")
    return f"table inet {TABLE} {{\n" + "\n".join(chains) + "\n}"


def _local_ports(pid: int) -> set[int]:
    """Return the ports of the pod's established connections to an API server, read in its network namespace."""
    ports = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state = line.split()[:4]
        if state == ESTABLISHED and int(remote.split(":")[1], 16) in API_PORTS:
            ports.add(int(local.split(":")[1], 16))
    return ports


def _nft(script: str) -> None:
    done = subprocess.run(["nft", "-f", "-"], input=script, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"nft: {done.stderr}\n{script}"
