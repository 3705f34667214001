"""A follower's process on a device that does something else than others: what, stands in its environment."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from replay_recorder import ReplayRecorder

from pagemill_execution.runners.device.device_ranks import DeviceSignals
from pagemill_execution.runners.device.graphs import GraphCapturer, GraphShape
from pagemill_execution.starting import load_device_ranks, load_ranks, rank_process
from pagemill_execution.weights.errors import LoadError

VARIABLE = "DEVICE_RANK"
SHAPES = [GraphShape(1, 1, True), GraphShape(4, 4, True), GraphShape(16, 4, False)]
Plan = dict[str, Any]
"""`records`: steps as graphs are; `raises`, `stops`: at the exchange of a step; `cannot load`: its weights."""


def fails(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the followers that are loaded next do something else."""
    monkeypatch.setattr(load_ranks, "RANK_PROCESS", "device_rank")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv(VARIABLE, json.dumps(plan))


@contextmanager
def recording(recorder: GraphCapturer) -> Iterator[None]:
    """Let runners that are loaded meanwhile record steps."""
    load = load_device_ranks._load

    def recorded(*given: Any) -> Any:
        runner = load(*given)
        runner.capture_graphs(SHAPES, lambda: recorder)
        return runner

    load_device_ranks._load = recorded
    try:
        yield
    finally:
        load_device_ranks._load = load


def main() -> None:
    plan: Plan = json.loads(os.environ[VARIABLE])
    if "cannot load" in plan:

        def fail(*_: Any) -> None:
            raise LoadError("ModelTooLarge", "no room for it")

        load_device_ranks.load_weights = fail
    if at := plan.get("raises") or plan.get("stops"):
        _disturb(*at, stops="stops" in plan)
    if "records" not in plan:
        rank_process.main()
        return
    with recording(ReplayRecorder()):
        rank_process.main()


def _disturb(step: int, number: int, *, stops: bool) -> None:
    come = DeviceSignals.come

    def coming(signals: DeviceSignals) -> None:
        if signals._marks.read()[:2] == (step, number - 1):
            if not stops:
                come(signals)
                raise MemoryError("no memory")
            threading.Event().wait()
        come(signals)

    DeviceSignals.come = coming  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
