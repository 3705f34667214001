"""Lengths of prompts and answers: log-normal, cut at the longest, with the requested mean.

The callers' defaults are the moments of Azure's public trace of LLM conversations of November 2023 (19,366 requests;
Patel et al., Splitwise, ISCA 2024): prompts of 1,155 tokens on average with 0.985 as the standard deviation of their
logarithm, answers of 211 with 0.859.
"""

from __future__ import annotations

import math
import random
from statistics import NormalDist

AZURE_PROMPT_TOKENS = 1155.0
AZURE_PROMPT_SIGMA = 0.985
AZURE_LONGEST_PROMPT = 14_050
AZURE_OUTPUT_TOKENS = 211.0
AZURE_OUTPUT_SIGMA = 0.859
AZURE_LONGEST_OUTPUT = 1_000
ROUNDS = 60
_NORMAL = NormalDist()


class LogNormal:
    """Whole numbers from 1 to `longest`."""

    def __init__(self, mean: float, sigma: float, longest: int) -> None:
        """`sigma` is the standard deviation of the logarithm; 0 always gives `mean`."""
        self._sigma, self._longest = sigma, longest
        self._mu = math.log(_median(mean, sigma, longest)) if sigma else 0.0
        self._always = max(1, min(longest, round(mean)))

    def draw(self, source: random.Random) -> int:
        if not self._sigma:
            return self._always
        # The logarithm is cut too, so that no exponential overflows.
        logarithm = min(source.gauss(self._mu, self._sigma), math.log(self._longest))
        return max(1, min(self._longest, round(math.exp(logarithm))))


def _median(mean: float, sigma: float, longest: int) -> float:
    """Return the median that gives `mean` after the cut, by bisection."""
    low, high = mean * 1e-9, longest * math.exp(12 * sigma)
    for _ in range(ROUNDS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _cut_mean(middle, sigma, longest) < mean else (low, middle)
    return math.sqrt(low * high)


def _cut_mean(median: float, sigma: float, longest: int) -> float:
    """Return the mean of min(x, longest) for log-normal x."""
    far = math.log(longest / median) / sigma
    below = median * math.exp(sigma * sigma / 2) * _NORMAL.cdf(far - sigma)
    return below + longest * _NORMAL.cdf(-far)
