"""One kernel on one shape: the run, its reference, the bytes and operations, and its peers."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from measuring import Device
from results import Section, Table, reported

TOLERANCE = 2e-2
"""Tolerance as a share of the largest value: bfloat16 has 8 bits, and sums of a whole row lose one or two of them."""

Run = Callable[[], torch.Tensor]


@dataclass
class Case:
    name: str
    ours: Run
    reference: Run
    num_bytes: float = 0.0
    """Bytes read and written."""
    num_flops: float = 0.0
    peers: dict[str, Run] = field(default_factory=dict)
    """The first run of a peer may compile or import; if it fails, its row contains the error."""
    tolerance: float = TOLERANCE


def measure(device: Device, section: Section, title: str, cases: list[Case]) -> None:
    """Check and time each case, Pagemill's own run first.

    A failed run has a row with its error; if one of Pagemill's own runs failed, the section fails at its end.
    """
    table = section.table(title, "case", "who", "us", "GB/s", "TFLOP/s", "% of copy", "% of product", "error")
    failed = [case.name for case in cases if not _measured(device, table, case, "pagemill", case.ours)]
    for case in cases:
        for who, run in case.peers.items():
            _measured(device, table, case, who, run)
    if failed:
        raise AssertionError(f"{len(failed)} of {len(cases)} cases failed: {'; '.join(failed)}")


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest expected value."""
    actual, expected = actual.float(), expected.reshape(actual.shape).float()
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def prepared(prepare: Callable[[], Run]) -> Run:
    """Return a run that is prepared when it is first called."""
    ready: list[Run] = []

    def run() -> torch.Tensor:
        if not ready:
            ready.append(prepare())
        return ready[0]()

    return run


def _measured(device: Device, table: Table, case: Case, who: str, run: Run) -> bool:
    try:
        expected = case.reference()
        error = difference(run(), expected)
        if who == "pagemill" and not error <= case.tolerance:
            raise AssertionError(f"differs from its reference by {error:.3g} of the largest value")
        seconds = device.seconds(run)
    except Exception as problem:
        if who == "pagemill":
            traceback.print_exc()
        table.add(case.name, who, *[""] * 5, reported(problem))
        return False
    table.add(case.name, who, *_figures(device, case, seconds), f"{error:.1e}")
    return True


def _figures(device: Device, case: Case, seconds: float) -> list[float | str]:
    rate, flops = case.num_bytes / seconds, case.num_flops / seconds
    return [
        seconds * 1e6,
        rate / 1e9 if rate else "",
        flops / 1e12 if flops else "",
        100 * rate / device.bytes_per_s if rate else "",
        100 * flops / device.flops if flops else "",
    ]
