"""Quantities and durations have the same meaning as in Kubernetes and Go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_protocol.resource.quantities import cpu_cores, duration_seconds, memory_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("1k", 1000), ("1Ki", 1024), ("512Mi", 512 * 2**20), ("1.5Gi", 3 * 2**29), ("2T", 2 * 10**12), (7, 7)],
)
def test_memory_quantities_are_read_like_in_kubernetes(text: str | int, expected: int) -> None:
    assert memory_bytes(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("2", 2.0), ("1.5", 1.5), ("500m", 0.5), (3, 3.0)])
def test_cpu_quantities_are_read_like_in_kubernetes(text: str | int, expected: float) -> None:
    assert cpu_cores(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("300ms", 0.3), ("30s", 30), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5)]
)
def test_durations_are_read_like_in_go(text: str, expected: float) -> None:
    assert duration_seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "Gi", "1GB", "1 Gi", "-1Gi", "1e3", "0x10", "1Gi\n"])
def test_an_invalid_memory_quantity_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="8Gi"):
        memory_bytes(text)


@pytest.mark.parametrize("text", ["", "5", "5 s", "s", "-5s", "1d", "5s "])
def test_an_invalid_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="30s"):
        duration_seconds(text)


@given(st.integers(min_value=0, max_value=10**15), st.sampled_from(["", "Ki", "M", "Gi"]))
def test_whole_numbers_of_bytes_stay_exact(number: int, suffix: str) -> None:
    factor = {"": 1, "Ki": 2**10, "M": 10**6, "Gi": 2**30}[suffix]
    assert memory_bytes(f"{number}{suffix}") == number * factor
