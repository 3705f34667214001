"""Variables that tune the libraries below, set before these are loaded. The engine's own settings: `config`."""

from __future__ import annotations

import os

_OPENMP = {
    # Turns that a thread spins for another before it sleeps: some 10 us, enough between two operations. The library's
    # own 300,000 take milliseconds from the very thread that is waited for wherever cores are shared: a decode step
    # of SmolLM2 beside other work took 700 ms instead of 20.
    "GOMP_SPINCOUNT": "300",
}


def tune_openmp() -> None:
    """What the environment says already wins."""
    for name, value in _OPENMP.items():
        os.environ.setdefault(name, value)
