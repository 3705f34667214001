"""The number of examples of property tests: the declared one in `make test-full`, a sample of it in `make test`.

The profiles are in `tests/conftest.py`; `--hypothesis-profile` selects one.
"""

from __future__ import annotations

from hypothesis import settings

IN_FULL = 100
"""Hypothesis' own default, to which every number of examples is relative."""


def num_examples(in_full: int) -> int:
    return max(1, in_full * settings().max_examples // IN_FULL)
