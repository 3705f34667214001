"""One request inside the brain: what is to be placed, and what is at an engine. Plain values, no decisions."""

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
    """Cost of its turn in the queue; None: it has not waited."""

    @property
    def work(self) -> RoutingRequest:
        """What an engine has to compute before its next token: of a continued answer, also all tokens so far."""
        if self.retry is None or not self.retry.num_tokens:
            return self.request
        return self.request._replace(num_prompt_tokens=self.request.num_prompt_tokens + self.retry.num_tokens)

    @property
    def queue_key(self) -> str:
        """The key under which it waits.

        A request that continues an answer has paid for its turn, and may wait for engines that others do not need: it
        waits under a key of its own, is due at once, and delays no other request.
        """
        return f"{self.ticket.key} {self._constraints}" if self._constraints else self.ticket.key

    @property
    def group(self) -> str:
        """Requests of one group wait for the same engines."""
        engines = f"{self.target.bundle_digest} adapters" if self.request.adapter_digest else self.target.bundle_digest
        return f"{engines} {self._constraints}" if self._constraints else engines

    @property
    def _constraints(self) -> str:
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
    """Cost of its turn; the expected cost here if it did not wait."""


def make_placement_request(
    deployment: DeploymentRecord | None,
    target: Target,
    tried: frozenset[str],
    request: RoutingRequest,
    ticket: QueueTicket,
    retry: RetryContext | None,
    probe: Probe = "none",
) -> PlacementRequest:
    """The expected output is learned from the deployment's answers and bounded by its context; it includes existing
    tokens.
    """
    num_output_tokens = 1
    if deployment is not None:
        num_there = retry.num_tokens // ticket.num_sequences if retry is not None else 0
        expected = max(deployment.output_tokens.expect(ticket.max_tokens), num_there + 1)
        num_output_tokens = max(1, min(expected, target.max_model_len - request.num_prompt_tokens))
    need = Need(
        request.num_prompt_tokens,
        request.num_prompt_tokens,
        num_output_tokens,
        ticket.num_sequences,
        ticket.max_tokens,
        ticket.gives_way,
    )
    return PlacementRequest(target, tried, request, ticket, retry, need, probe)
