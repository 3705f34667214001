"""Live traffic with an oscillating rate, and a batch whose lines use the idle capacity.

`fleet.batch_lines` starts the lines by the gateway's rule.
"""

from __future__ import annotations

import random
from typing import ClassVar

from pagemill_servers.keys.caller import Caller
from pagemill_simulator.parameters import Count, NotNegative, Positive, Sigma
from pagemill_simulator.workloads.lengths import LogNormal
from pagemill_simulator.workloads.request import SimRequest
from pagemill_simulator.workloads.shapes import Sine

LINE_PRIORITY = Caller(is_batch=True).priority(0)
"""Priority of a line in gateways and engines."""


class BesideBatch(Sine, frozen=True, kw_only=True):
    """A rate that oscillates around its mean, and one batch."""

    name: ClassVar[str] = "beside-batch"
    num_lines: Count = 1000
    """Lines of the batch."""
    submitted_s: NotNegative = 60.0
    """Second at which the batch arrives."""
    line_prompt_tokens: Positive = 600.0
    """Prompt tokens of a line, mean."""
    line_output_tokens: Positive = 150.0
    """Answer tokens of a line, mean."""
    line_sigma: Sigma = 0.6
    """Standard deviation of the logarithms of both."""

    def lines(self, seed: int) -> list[SimRequest]:
        sizes = random.Random(f"lines {seed}")
        prompt = LogNormal(self.line_prompt_tokens, self.line_sigma, self.longest_prompt)
        output = LogNormal(self.line_output_tokens, self.line_sigma, self.longest_output)
        return [
            SimRequest(self.submitted_s, prompt.draw(sizes), output.draw(sizes), priority=LINE_PRIORITY)
            for _ in range(int(self.num_lines))
        ]
