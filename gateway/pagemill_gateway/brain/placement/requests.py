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
    request: RoutingRequest
    ticket: QueueTicket
    retry: RetryContext | None
    need: Need
    """As if nothing of the prompt were cached."""
    probe: Probe = "none"
    charged_tokens: int | None = None
    """For its turn in the queue; None: it has not waited."""

    @property
    def work(self) -> RoutingRequest:
        """What an engine has to compute before its next token: of an answer that is continued, all of it so far."""
        if self.retry is None or not self.retry.num_tokens:
            return self.request
        return self.request._replace(num_prompt_tokens=self.request.num_prompt_tokens + self.retry.num_tokens)

    @property
    def line(self) -> str:
        """The key in whose line it waits.

        What continues an answer has paid for its turn, and may wait for what others need not: it stands in a line of
        its own, due at once, and holds up nobody.
        """
        return f"{self.ticket.key} {self._wants}" if self._wants else self.ticket.key

    @property
    def group(self) -> str:
        """Those of one group wait for the same."""
        engines = f"{self.target.bundle_digest} adapters" if self.request.adapter_digest else self.target.bundle_digest
        return f"{engines} {self._wants}" if self._wants else engines

    @property
    def _wants(self) -> str:
        if self.retry is None or not (self.probe != "none" or self.retry.weights_digest):
            return ""
        return f"{self.probe} {self.retry.weights_digest}"


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
    request: RoutingRequest,
    ticket: QueueTicket,
    retry: RetryContext | None,
    probe: Probe = "none",
) -> PlacementRequest:
    """Output as learned from the deployment's answers and within its context; what is there already is part of it."""
    num_output_tokens = 1
    if deployment is not None:
        num_there = retry.num_tokens // ticket.num_sequences if retry is not None else 0
        expected = max(deployment.output_tokens.expect(ticket.max_tokens), num_there + 1)
        num_output_tokens = max(1, min(expected, target.max_model_len - request.num_prompt_tokens))
    need = Need(
        request.num_prompt_tokens, request.num_prompt_tokens, num_output_tokens, ticket.num_sequences, ticket.max_tokens
    )
    return PlacementRequest(target, tried, request, ticket, retry, need, probe)
