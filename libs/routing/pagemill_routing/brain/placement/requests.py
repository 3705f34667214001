"""The values that describe a request inside the brain: one to be placed, and one at an engine."""

from __future__ import annotations

import msgspec

from pagemill_routing.admission.reservations import CapacityNeed
from pagemill_routing.brain.endpoints.deployment import DeploymentRecord
from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_routing.brain.interface import Probe, QueueTicket, RetryContext, RoutingRequest, Target


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """A request to be placed."""

    target: Target
    tried: frozenset[str]
    request: RoutingRequest
    ticket: QueueTicket
    retry: RetryContext | None
    need: CapacityNeed
    """The need without cached prompt tokens."""
    probe: Probe = "none"
    charged_tokens: int | None = None
    """The cost of its turn in the queue; None if it has not waited."""

    @property
    def work(self) -> RoutingRequest:
        """The request as the engine must compute it: the prompt of a continuation includes the generated tokens."""
        if self.retry is None or not self.retry.num_tokens:
            return self.request
        return msgspec.structs.replace(
            self.request, num_prompt_tokens=self.request.num_prompt_tokens + self.retry.num_tokens
        )

    @property
    def queue_key(self) -> str:
        """The key under which the request waits.

        A continuation has paid for its turn and may need certain engines. It waits under a key of its own, so that it
        is due at once and delays no other request.
        """
        return f"{self.ticket.key} {self._constraints}" if self._constraints else self.ticket.key

    @property
    def group(self) -> str:
        """The name of the group of requests that need the same engines."""
        engines = f"{self.target.bundle_digest} {self.target.adapter_digest}".rstrip()
        return f"{engines} {self._constraints}" if self._constraints else engines

    @property
    def _constraints(self) -> str:
        if self.retry is None or not (self.probe != "none" or self.retry.weights_digest):
            return ""
        return f"{self.probe} {self.retry.weights_digest}"


class InFlightRequest(msgspec.Struct, frozen=True):
    """A request at an engine."""

    record: EndpointRecord
    need: CapacityNeed
    key: str
    priority: int
    charged_tokens: int
    """The cost of its turn, or its expected cost at the engine if it did not wait."""
    is_freed: bool = False
    """Whether the engine has computed it, so that it counts there no longer."""


def make_placement_request(
    deployment: DeploymentRecord | None,
    target: Target,
    tried: frozenset[str],
    request: RoutingRequest,
    ticket: QueueTicket,
    retry: RetryContext | None,
    probe: Probe = "none",
) -> PlacementRequest:
    """Return the placement request. Its expected output is estimated from the deployment's answers.

    The expected output includes the tokens of a continuation, and is limited by the context.
    """
    num_output_tokens = 1
    if deployment is not None:
        num_there = retry.num_tokens // ticket.num_sequences if retry is not None else 0
        expected = max(deployment.output_tokens.expect(ticket.max_tokens), num_there + 1)
        num_output_tokens = max(1, min(expected, target.max_model_len - request.num_prompt_tokens))
    need = CapacityNeed(
        request.num_prompt_tokens,
        request.num_prompt_tokens,
        num_output_tokens,
        ticket.num_sequences,
        ticket.max_tokens,
        ticket.is_low_priority,
        ticket.num_logprobs,
    )
    return PlacementRequest(target, tried, request, ticket, retry, need, probe)
