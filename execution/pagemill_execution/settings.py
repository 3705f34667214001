"""Environment variables that tune libraries and must be set before these are loaded.

`config` has the engine's settings.
"""

from __future__ import annotations

import os

_OPENMP = {
    # Number of times that a thread of torch spins for another before it sleeps. Below 2,000 it sleeps between two
    # operations (SmolLM2 on two quiet cores: 23 ms a token with 300, 11 with 1,000, 8 from 2,000 on). The library's
    # default of 300,000 takes milliseconds from the very thread that is waited for wherever cores are shared: 700 ms a
    # token with other work on the machine, 100 with 3,000.
    "GOMP_SPINCOUNT": "3000",
}


_ONEDNN = {
    # torch keeps up to 1,024 compiled oneDNN primitives, one for each shape of a matmul: with prompts of all lengths an
    # engine grows by hundreds of MiB until the limit is reached. Steps reuse few shapes, and compiling one takes little
    # time.
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


def tune_libraries() -> None:
    """Set the variables that the environment does not have."""
    for name, value in {**_OPENMP, **_ONEDNN}.items():
        os.environ.setdefault(name, value)
