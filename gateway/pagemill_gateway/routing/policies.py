"""The registry of routing policies by their names in settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pagemill_gateway.routing.cost import CostPolicy
from pagemill_gateway.routing.least_request import LeastRequest
from pagemill_gateway.routing.policy import RoutingPolicy
from pagemill_gateway.routing.power_of_two import PowerOfTwo
from pagemill_gateway.routing.prefix_hash import PrefixHash
from pagemill_gateway.routing.round_robin import RoundRobin
from pagemill_gateway.routing.weighted322 import Weighted322

PolicyName = Literal["Cost", "LeastRequest", "RoundRobin", "PowerOfTwo", "PrefixHash", "Weighted322"]

_MAKERS: dict[str, Callable[[], RoutingPolicy]] = {
    "LeastRequest": LeastRequest,
    "RoundRobin": RoundRobin,
    "PowerOfTwo": PowerOfTwo,
    "PrefixHash": PrefixHash,
    "Weighted322": Weighted322,
}


class RoutingPolicies:
    """The policy objects, which all deployments share."""

    def __init__(self, default: PolicyName, session_ms: float) -> None:
        self._policies = {name: make() for name, make in _MAKERS.items()}
        self._policies["Cost"] = CostPolicy(session_ms)
        self._default = self._policies[default]

    def named(self, name: str) -> RoutingPolicy:
        """Return the policy with the name; the default for `Auto` and for names of a newer operator."""
        return self._policies.get(name, self._default)
