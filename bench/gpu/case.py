"""One kernel on one shape: what runs, what it must equal, what it moves and computes, and who does the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from measuring import Device
from results import Section

TOLERANCE = 2e-2
"""Of the largest value: bfloat16 has 8 bits, and sums of a whole row lose one or two of them."""

Run = Callable[[], torch.Tensor]


@dataclass
class Case:
    name: str
    ours: Run
    reference: Run
    num_bytes: float = 0.0
    """Read and written."""
    num_flops: float = 0.0
    peers: dict[str, Run] = field(default_factory=dict)
    tolerance: float = TOLERANCE


def measure(device: Device, section: Section, title: str, cases: list[Case]) -> None:
    """Check and time each; a peer that fails is told as such, our own failures end the section."""
    table = section.table(title, "case", "who", "us", "GB/s", "TFLOP/s", "% of copy", "% of product", "error")
    for case in cases:
        expected = case.reference()
        for who, run in {"pagemill": case.ours, **case.peers}.items():
            try:
                error = difference(run(), expected)
                seconds = device.seconds(run)
            except Exception as problem:
                if who == "pagemill":
                    raise
                table.add(case.name, who, *[""] * 5, f"{type(problem).__name__}: {str(problem)[:80]}")
                continue
            if who == "pagemill" and not error <= case.tolerance:
                raise AssertionError(f"{case.name}: differs from its reference by {error:.3g} of the largest value")
            table.add(case.name, who, *_figures(device, case, seconds), f"{error:.1e}")


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest one, as a share of the largest value."""
    actual, expected = actual.float(), expected.reshape(actual.shape).float()
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def _figures(device: Device, case: Case, seconds: float) -> list[float | str]:
    rate, flops = case.num_bytes / seconds, case.num_flops / seconds
    return [
        seconds * 1e6,
        rate / 1e9 if rate else "",
        flops / 1e12 if flops else "",
        100 * rate / device.bytes_per_s if rate else "",
        100 * flops / device.flops if flops else "",
    ]
