"""What all ranks of an engine must have in common, and the line in which a follower says that it is ready.

Rank 0 compares before anything is computed: programs or weights that differ would give wrong tokens without an error.
"""

from __future__ import annotations

from importlib.metadata import version

import msgspec

from pagemill_execution.runners.ranks.messages import FORMAT
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.cpu.library import ABI_VERSION


class RankIdentity(msgspec.Struct, frozen=True):
    version: str
    messages: int
    """The format of plans and results."""
    kernels: int
    """The version of the native kernels' interface."""
    weights: str = ""
    """The digest of the whole model; empty until it is known."""

    @classmethod
    def own(cls, weights: str = "") -> RankIdentity:
        return cls(version("pagemill-engine"), FORMAT, ABI_VERSION, weights)


class RankReport(msgspec.Struct):
    """What a follower says once: that it has loaded its part, or why not."""

    identity: RankIdentity
    num_bytes: int = 0
    """Of its weights."""
    error: str = ""


_WHAT = {
    "version": ("version", "Install the same version of pagemill for all ranks."),
    "messages": ("format of plans", "Install the same version of pagemill for all ranks."),
    "kernels": ("version of the native kernels' interface", "Install the same version of pagemill for all ranks."),
    "weights": ("digest of the weights", "Give all ranks the same files of one revision of the model."),
}


def check_same(who: str, found: RankIdentity, own: RankIdentity) -> None:
    """Raise `LoadError` for the first field in which a rank differs from rank 0. `who`: names the rank."""
    for field, (what, remedy) in _WHAT.items():
        here, there = getattr(own, field), getattr(found, field)
        if here != there and "" not in (here, there):
            raise LoadError("RankMismatch", f"{who} has the {what} {there}, but rank 0 has {here}. {remedy}")


def encode_report(report: RankReport) -> bytes:
    return msgspec.json.encode(report) + b"\n"


def decode_report(line: bytes) -> RankReport | None:
    """Return the report of a line; None if a process has said something else."""
    try:
        return msgspec.json.decode(line, type=RankReport)
    except msgspec.DecodeError:
        return None
