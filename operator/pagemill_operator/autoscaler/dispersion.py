"""The dispersion of arrivals: the variance of the number of requests in a few seconds, divided by its mean.

It is 1 for requests that arrive independently of each other, and larger where they arrive in clusters, as completions
of code or the calls of agents do. Then the same number of arrivals determines the rate less precisely, a rise or a
burst must be larger to be significant, and requests wait longer at the same rate. The counts of neighbouring windows
are compared, so a rate that changes slowly adds nothing; the largest of each twenty differences is left out, since a
step of the rate makes one. Neighbours: `memory` keeps the counts, `expected_load` and `slo` use the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

LEAST_PAIRS = 5
"""The fewest pairs of windows from which a dispersion is computed."""
PAIRS_PER_STEP = 20
CHANCE_SPREADS = 1.645
"""Standard deviations that independent arrivals exceed in one of 20 cases."""


def dispersion(counts: Sequence[float]) -> float:
    """Return the dispersion of the counts of consecutive windows of one length; 1 where chance may explain it."""
    # The difference of two independent counts has the variance of their sum.
    ratios = sorted((after - before) ** 2 / (after + before) for before, after in pairwise(counts) if after + before)
    ratios = ratios[: len(ratios) - math.ceil(len(ratios) / PAIRS_PER_STEP)]
    if len(ratios) < LEAST_PAIRS:
        return 1.0
    found = sum(ratios) / len(ratios)
    return found if found > 1.0 + CHANCE_SPREADS * math.sqrt(2.0 / len(ratios)) else 1.0
