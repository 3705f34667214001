"""How unevenly requests arrive: the variance of their number in a few seconds, by its mean.

1 for requests that come independently of each other; more where they come together, as completions of code do, or the
calls of agents: then as many arrivals say less of the rate, a rise or a burst must be larger before it is none of
chance, and a replica waits more for the same rate. Counts of neighbouring windows are compared, so that a rate that
changes slowly adds nothing, and the largest difference in each twenty is left out, which a step makes.
Neighbours: `memory` keeps the counts, `expected_load` and `slo` ask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

LEAST_PAIRS = 5
"""With fewer nothing is known."""
PAIRS_PER_STEP = 20
CHANCE_SPREADS = 1.645
"""Independent arrivals show as much dispersion in one of 20 cases."""


def dispersion(counts: Sequence[float]) -> float:
    """Of the numbers of requests in windows of one length, one after the other; 1 where it may be chance."""
    # The difference of two independent counts has the variance of their sum.
    ratios = sorted((after - before) ** 2 / (after + before) for before, after in pairwise(counts) if after + before)
    ratios = ratios[: len(ratios) - math.ceil(len(ratios) / PAIRS_PER_STEP)]
    if len(ratios) < LEAST_PAIRS:
        return 1.0
    found = sum(ratios) / len(ratios)
    return found if found > 1.0 + CHANCE_SPREADS * math.sqrt(2.0 / len(ratios)) else 1.0
