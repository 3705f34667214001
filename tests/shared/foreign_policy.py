"""A scaling policy in a package of its own that is installed for one test and found by its entry point.

`PerRequest` requires one replica for every four running requests, and never fewer than before.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from packages import install_package

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
    lines = [f"{name} = {value}" for name, value in entries.items()]
    install_package(folder, monkeypatch, "foreign_policies", module, GROUP, *lines)
    registered.cache_clear()


def uninstall() -> None:
    registered.cache_clear()
