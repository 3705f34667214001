"""The base of workload generators: parameters that give the same requests for the same seed.

Most are a rate of arrivals over time (`shapes.py`) with log-normal lengths; `agentic.py` has sessions of agents.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from pagemill_simulator.parameters import Count, ParameterError, Parameters, Positive, Sigma
from pagemill_simulator.workloads import lengths
from pagemill_simulator.workloads.arrivals import poisson
from pagemill_simulator.workloads.lengths import LogNormal
from pagemill_simulator.workloads.request import SimRequest, Workload

MOST_REQUESTS = 50_000_000


class Generator(Parameters, frozen=True, kw_only=True):
    """Draws one kind of workload."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def length_s(self) -> float:
        """Seconds for which traffic is offered."""

    @abstractmethod
    def requests(self, seed: int) -> list[SimRequest]:
        """Return the requests by arrival."""

    def lines(self, seed: int) -> list[SimRequest]:
        """Return the lines of batches beside the requests."""
        return []

    @abstractmethod
    def intensity_at(self, at_s: float) -> float:
        """Return the mean intensity at that instant over everything that may be drawn, in the unit of `steady`."""

    @abstractmethod
    def steady(self, intensity: float, duration_s: float) -> Generator:
        """Return constant traffic of the same kind; `intensity` is above 0."""

    def workload(self, seed: int = 0) -> Workload:
        shown = ", ".join(f"{name}={value:g}" for name, value in msgspec.structs.asdict(self).items())
        return Workload(
            name=self.name,
            source=f"{self.name}({shown}), seed {seed}",
            requests=self.requests(seed),
            lines=self.lines(seed),
            duration_s=self.length_s,
        )


class Shaped(Generator, frozen=True, kw_only=True):
    """Independent requests."""

    prompt_tokens: Positive = lengths.AZURE_PROMPT_TOKENS
    """Tokens of a prompt, mean."""
    output_tokens: Positive = lengths.AZURE_OUTPUT_TOKENS
    """Tokens of an answer, mean."""
    prompt_sigma: Sigma = lengths.AZURE_PROMPT_SIGMA
    """Standard deviation of the logarithm of prompt lengths; 0: all have the same length."""
    output_sigma: Sigma = lengths.AZURE_OUTPUT_SIGMA
    """The same for answers."""
    longest_prompt: Count = lengths.AZURE_LONGEST_PROMPT
    """Tokens at which longer prompts are cut."""
    longest_output: Count = lengths.AZURE_LONGEST_OUTPUT
    """Tokens at which longer answers are cut."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, mean, longest in (
            ("prompt", self.prompt_tokens, self.longest_prompt),
            ("output", self.output_tokens, self.longest_output),
        ):
            if mean > longest:
                raise ParameterError(
                    f"{name}_tokens: a mean of {mean:g} with nothing longer than {longest}; raise longest_{name}"
                )
        if self.length_s <= 0:
            raise ParameterError("the workload has no duration; set one of its times above 0")
        if self.most_per_s * self.length_s > MOST_REQUESTS:
            raise ParameterError(
                f"rates of up to {self.most_per_s:g} requests/s for {self.length_s:g} s are more than "
                f"{MOST_REQUESTS:,} requests; lower the rate or the duration"
            )

    @property
    @abstractmethod
    def most_per_s(self) -> float:
        """The highest rate, in requests per second."""

    @abstractmethod
    def rate_at(self, at_s: float) -> float:
        """Return the rate in requests per second."""

    def intensity_at(self, at_s: float) -> float:
        return self.rate_at(at_s)

    def arrivals(self, times: random.Random) -> Iterable[float]:
        """Return rising seconds; independent of each other unless a generator says otherwise."""
        return poisson(times, self.rate_at, most=self.most_per_s, duration_s=self.length_s)

    def requests(self, seed: int) -> list[SimRequest]:
        # Two sources, so that a longer or denser run begins with the same lengths.
        times, sizes = random.Random(f"arrivals {seed}"), random.Random(f"lengths {seed}")
        prompt = LogNormal(self.prompt_tokens, self.prompt_sigma, self.longest_prompt)
        output = LogNormal(self.output_tokens, self.output_sigma, self.longest_output)
        return [SimRequest(at_s, prompt.draw(sizes), output.draw(sizes)) for at_s in self.arrivals(times)]
