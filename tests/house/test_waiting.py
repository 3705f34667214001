"""Waits of tests end with their condition, continue while there is progress, and fail without it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import waiting
from waiting import event_in, eventually, wait_until


def after(num_looks: int):
    looks = iter(range(num_looks))
    return lambda: next(looks, None) is None


async def test_a_wait_ends_when_its_condition_is_true_and_returns_its_value() -> None:
    found = iter([0, None, "", "found"])
    assert await eventually(lambda: next(found)) == "found"
    wait_until(after(3))


async def test_a_condition_may_be_a_coroutine() -> None:
    is_over = after(3)

    async def condition() -> bool:
        return is_over()

    await eventually(condition)


async def test_a_wait_without_progress_fails_and_names_its_condition() -> None:
    with pytest.raises(AssertionError, match=r"without progress.* 1 > 2"):
        await eventually(lambda: 1 > 2, limit_s=0.05)
    with pytest.raises(AssertionError, match="without progress"):
        wait_until(lambda: 1 > 2, limit_s=0.05, every_s=0.001)


def test_a_wait_continues_while_there_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def condition() -> bool:
        nonlocal count
        count += 1
        return count == 20

    clock = iter(range(1000))
    monkeypatch.setattr(waiting, "MOST_PER_LOOK_S", 10.0)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: float(next(clock)))
    wait_until(condition, progress=lambda: count, limit_s=5.0, every_s=0.0)
    count = -1000
    with pytest.raises(AssertionError, match=r"without progress.*; progress ended at -100$"):
        wait_until(condition, progress=lambda: count // 10, limit_s=5.0, every_s=0.0)


def test_time_in_which_the_process_did_not_run_hardly_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100_000, 100))
    monkeypatch.setattr(waiting.time, "monotonic", lambda: float(next(clock)))
    wait_until(after(20), limit_s=15.0, every_s=0.0)


def test_waiting_for_an_event_fails_as_soon_as_the_process_has_ended(tmp_path: Path) -> None:
    (log := tmp_path / "log").write_text('{"event":"other"}\nnoise\n')
    process = subprocess.Popen([sys.executable, "-c", ""])
    began_s = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)the process exited before listening; .*noise"):
        event_in(log, "listening", process)
    assert time.monotonic() - began_s < waiting.WAIT_LIMIT_S
    assert event_in(log, "other", process) == {"event": "other"}
