"""A scaling policy in a package of its own that is installed for one test and found by its entry point.

`PerRequest` requires one replica for every four running requests, and never fewer than before.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill_operator.autoscaler.registry import GROUP, registered

NAME = "PerRequest"
MODULE = """
from __future__ import annotations

import msgspec

from pagemill_operator.autoscaler.decision import decided


class Most(msgspec.Struct, frozen=True):
    replicas: int = 0


class PerRequest:
    name = "PerRequest"
    memory_type = Most
    sees_replicas = True
    reads_slo = True

    def decide(self, settings, signals, memory):
        running = sum(replica.num_requests for replica in signals.replicas)
        most = max(memory.replicas, signals.fleet.wanted, -(-running // 4), min(1, signals.num_requests))
        return decided(signals.fleet.wanted, most, f"{running} requests run"), Most(most)
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entries: dict[str, str], module: str = MODULE) -> None:
    """Install a package `foreign_policies` with these entry points (name -> object)."""
    (folder / "foreign_policies.py").write_text(module)
    metadata = folder / "foreign_policies-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-policies\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(__import__("sys").modules, "foreign_policies", raising=False)
    registered.cache_clear()


def uninstall() -> None:
    registered.cache_clear()
