"""A fork's second stream waits for earlier work, and later work waits for the fork."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagemill_kernels.gpu import launch


class Stream:
    def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
        self.name, self._waits = name, waits

    def wait_stream(self, other: Any) -> None:
        self._waits.append((self.name, other.name))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record the waits: (waiting stream, other stream)."""
    found: list[tuple[str, str]] = []
    here, side = Stream("current", found), Stream("side", found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda on: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(launch, "_side_stream", lambda on: side)
    return found


def test_streams_wait_for_each_other_before_and_after_the_fork(waits: list[tuple[str, str]]) -> None:
    with launch.forked(torch.device("cuda", 0)) as beside:
        assert getattr(beside, "name", None) == "side"
        assert waits == [("side", "current")]
    assert waits == [("side", "current"), ("current", "side")]


def test_the_current_stream_also_waits_after_a_failed_launch(waits: list[tuple[str, str]]) -> None:
    with pytest.raises(RuntimeError, match="no such kernel"), launch.forked(torch.device("cuda", 0)):
        raise RuntimeError("no such kernel")
    assert waits == [("side", "current"), ("current", "side")]


def test_without_a_device_there_is_only_one_stream(waits: list[tuple[str, str]]) -> None:
    with launch.forked(torch.device("cpu")) as beside, beside:
        pass
    assert waits == []
