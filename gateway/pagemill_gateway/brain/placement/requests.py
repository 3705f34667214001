"""One request in the brain's own words: what is to be placed, and what is at an engine. Plain values, no decisions."""

from __future__ import annotations

from typing import NamedTuple

from pagemill_gateway.admission.reservations import Need
from pagemill_gateway.brain.endpoints.deployment import DeploymentRecord
from pagemill_gateway.brain.endpoints.record import EndpointRecord
from pagemill_gateway.brain.interface import Probe, QueueTicket, RetryContext, RoutingRequest, Target


class PlacementRequest(NamedTuple):
    """A request that is to be placed."""

    target: Target
    tried: frozenset[str]
    ask: RoutingRequest
    claim: QueueTicket
    again: RetryContext | None
    need: Need
    """As if nothing of the prompt were cached."""
    trial: Probe = "none"
    charged_tokens: int | None = None
    """For its turn in the queue; None: it has not waited."""

    @property
    def work(self) -> RoutingRequest:
        """What an engine has to compute before its next token: of an answer that is continued, all of it so far."""
        if self.again is None or not self.again.num_tokens:
            return self.ask
        return self.ask._replace(num_prompt_tokens=self.ask.num_prompt_tokens + self.again.num_tokens)

    @property
    def line(self) -> str:
        """The key in whose line it waits.

        What continues an answer has paid for its turn, and may wait for what others need not: it stands in a line of
        its own, due at once, and holds up nobody.
        """
        return f"{self.claim.key} {self._wants}" if self._wants else self.claim.key

    @property
    def group(self) -> str:
        """Those of one group wait for the same."""
        engines = f"{self.target.bundle_digest} adapters" if self.ask.adapter_digest else self.target.bundle_digest
        return f"{engines} {self._wants}" if self._wants else engines

    @property
    def _wants(self) -> str:
        if self.again is None or not (self.trial != "none" or self.again.weights_digest):
            return ""
        return f"{self.trial} {self.again.weights_digest}"


class InFlightRequest(NamedTuple):
    """A request that is at an engine."""

    record: EndpointRecord
    need: Need
    key: str
    priority: int
    charged_tokens: int
    """For its turn; as much as it was thought to cost here where it had to wait for none."""


def make_placement_request(
    deployment: DeploymentRecord | None,
    target: Target,
    tried: frozenset[str],
    ask: RoutingRequest,
    claim: QueueTicket,
    again: RetryContext | None,
    trial: Probe = "none",
) -> PlacementRequest:
    """Output as learned from the deployment's answers and within its context; what is there already is part of it."""
    num_output_tokens = 1
    if deployment is not None:
        num_there = again.num_tokens // claim.num_sequences if again is not None else 0
        expected = max(deployment.output_tokens.expect(claim.max_tokens), num_there + 1)
        num_output_tokens = max(1, min(expected, target.max_model_len - ask.num_prompt_tokens))
    need = Need(ask.num_prompt_tokens, ask.num_prompt_tokens, num_output_tokens, claim.num_sequences, claim.max_tokens)
    return PlacementRequest(target, tried, ask, claim, again, need, trial)
