"""Memory of weights is filled like any other memory and keeps its values when it is moved to huge pages."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import numpy as np
import pytest

from pagemill_kernels import huge_pages
from pagemill_kernels.huge_pages import LEAST_BYTES, PIECE_BYTES, collapse_when_idle, empty_weights

ROWS, COLUMNS = 1024, LEAST_BYTES // 1024


@pytest.fixture(autouse=True)
def nothing_else_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_mapped", type(huge_pages._mapped)())


def huge_kib() -> int:
    return sum(map(int, re.findall(r"AnonHugePages:\s+(\d+)", Path("/proc/self/smaps").read_text())))


def test_values_are_unchanged_after_the_move_to_huge_pages() -> None:
    weights = empty_weights((ROWS, COLUMNS))
    weights[:] = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32)
    before, copy = huge_kib(), weights.copy()
    collapse_when_idle().join()
    assert np.array_equal(weights, copy)
    assert huge_kib() >= before
    weights[0] = 1
    assert weights[0, 0] == 1


def test_small_arrays_stay_in_ordinary_memory() -> None:
    assert empty_weights(16, np.uint8).shape == (16,)
    assert not list(huge_pages._mapped)


def test_memory_of_deleted_arrays_is_released() -> None:
    weights = empty_weights(LEAST_BYTES, np.uint8)
    assert len(huge_pages._mapped) == 1
    part = weights[10:].view(np.int8)
    del weights
    gc.collect()
    assert len(huge_pages._mapped) == 1, "a view of it is in use"
    del part
    gc.collect()
    assert not list(huge_pages._mapped)


def test_without_huge_pages_memory_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "MADV_COLLAPSE", 10_000)
    weights = empty_weights(LEAST_BYTES, np.uint8)
    weights[:] = 7
    collapse_when_idle().join()
    assert (weights == 7).all()


def test_a_last_piece_without_a_whole_huge_page_does_not_end_the_move(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "pagemill_kernels.huge_pages")
    kept = [empty_weights(PIECE_BYTES, np.uint8)]
    kept[0][:] = 1
    collapse_when_idle().join()
    if caplog.text:
        pytest.skip("the system moves nothing to huge pages")
    for more in (1000, LEAST_BYTES - 1):
        kept.append(empty_weights(PIECE_BYTES + more, np.uint8))
        kept[-1][:] = 1
    collapse_when_idle().join()
    assert not caplog.text
