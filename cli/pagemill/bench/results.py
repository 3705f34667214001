"""A finished measurement as a file, which later measurements are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pagemill.bench.conversations import BenchError
from pagemill.bench.samples import BenchRun, LatencyLimits, figures

VERSION = 1


class Measured(msgspec.Struct):
    """A run at one load."""

    load: str
    concurrency: int | None
    rate_per_s: float | None
    run: BenchRun


class Result(msgspec.Struct):
    model: str
    source: str
    """The texts that were sent: the file, or the generator with its parameters and seed."""
    slo: LatencyLimits
    measured: list[Measured]
    version: int = VERSION

    def report(self, each: Measured) -> dict[str, Any]:
        """Return the figures of one load as the last line of output has them."""
        return {
            "model": self.model,
            "concurrency": each.concurrency,
            "rate_per_s": each.rate_per_s,
            "source": self.source,
            **figures(each.run, self.slo),
        }


def write_result(path: Path, result: Result) -> None:
    """Raises `BenchError`."""
    write_text("--save", path, msgspec.json.encode(result))


def write_text(option: str, path: Path, text: bytes) -> None:
    """Raises `BenchError`, with the option that named the file."""
    try:
        path.write_bytes(text)
    except OSError as error:
        raise BenchError(f"{option} {path}: cannot be written ({error.strerror}); choose another file") from None


def read_result(path: Path) -> Result:
    """Raises `BenchError`."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise BenchError(f"--compare {path}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"--compare {path}: is no result that --save has written ({error})") from None
    if found.version != VERSION:
        raise BenchError(f"--compare {path}: has version {found.version}, this program reads {VERSION}; measure again")
    return found
