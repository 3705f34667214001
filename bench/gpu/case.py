"""One kernel on one shape: the run, its reference, the bytes and operations, and its peers."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from measuring import Device
from rows import Section

TOLERANCE = 2e-2
"""Tolerance as a share of the largest value: bfloat16 has 8 bits, and sums of a whole row lose one or two of them."""
PEERS_TOLERANCE = 0.1
"""The same for peers, some of which multiply in another type."""
UNIT = "us"

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


def measure(device: Device, section: Section, cases: list[Case]) -> None:
    """Check and time each case that no earlier run of the same code has measured, Pagemill's own run first.

    A failed run has a row with its error; if one of Pagemill's own runs failed, the section fails at its end.
    """
    failed = [case.name for case in cases if not section.has(case.name, UNIT) and not _ours(device, section, case)]
    for case in cases:
        for who, run in case.peers.items():
            if not section.has(case.name, UNIT, who):
                _peer(device, section, case, who, run)
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


def reported(problem: Exception, length: int = 120) -> str:
    """Return an exception as one line for a table."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:length]}"


def _ours(device: Device, section: Section, case: Case) -> bool:
    limit = 1e6 * max(case.num_bytes / device.bytes_per_s, case.num_flops / device.flops) or None
    try:
        seconds, error = _checked(device, case, case.ours)
        if not error <= case.tolerance:
            raise AssertionError(f"differs from its reference by {error:.3g} of the largest value")
    except Exception as problem:
        traceback.print_exc()
        section.add(case.name, UNIT, None, limit=limit, error=reported(problem))
        return False
    section.add(case.name, UNIT, 1e6 * seconds, limit=limit)
    return True


def _peer(device: Device, section: Section, case: Case, who: str, run: Run) -> None:
    """Time a peer; one that computes something else has no figure."""
    limit = 1e6 * max(case.num_bytes / device.bytes_per_s, case.num_flops / device.flops) or None
    ours = section.own(case.name, UNIT)
    try:
        seconds, error = _checked(device, case, run)
        if not error <= PEERS_TOLERANCE:
            raise AssertionError(f"differs from the reference by {error:.3g} of the largest value")
    except Exception as problem:
        section.add(case.name, UNIT, ours, limit=limit, peer_name=who, error=reported(problem))
        return
    section.add(case.name, UNIT, ours, limit=limit, peer_name=who, peer=1e6 * seconds)


def _checked(device: Device, case: Case, run: Run) -> tuple[float, float]:
    """Return the seconds of a run and its difference from the reference; without a device nothing is computed."""
    if device.is_dry_run:
        case.reference()
        run()
        return 1e-6, 0.0
    error = difference(run(), case.reference())
    return device.seconds(run), error
