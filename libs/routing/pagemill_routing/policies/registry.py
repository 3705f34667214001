"""The routing policies by name: the gateway's own, and those that installed packages register.

A package registers a policy as an entry point of group `pagemill.routing_policies`. The entry point's name is the
policy's name, and its object is a subclass of `RoutingPolicy` that can be made without arguments. Where one cannot be
used, the default policy decides for its deployments, and the log says why.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points

from pagemill_routing.policies.cost import CostPolicy
from pagemill_routing.policies.least_request import LeastRequest
from pagemill_routing.policies.policy import RoutingPolicy
from pagemill_routing.policies.power_of_two import PowerOfTwo
from pagemill_routing.policies.prefix_hash import PrefixHash
from pagemill_routing.policies.round_robin import RoundRobin
from pagemill_routing.policies.weighted322 import Weighted322

logger = logging.getLogger("pagemill.gateway.routing")

GROUP = "pagemill.routing_policies"
AUTO = "Auto"
"""The name of the gateway's default policy in `spec.routing.policy`."""
BUILT_IN: tuple[type[RoutingPolicy], ...] = (
    CostPolicy,
    LeastRequest,
    RoundRobin,
    PowerOfTwo,
    PrefixHash,
    Weighted322,
)


class RoutingPolicies:
    """The policy objects, which all deployments share."""

    def __init__(self, default: str, session_ms: float) -> None:
        """`session_ms`: what `CostPolicy` pays to keep a session. Raises `ValueError` for an unknown `default`."""
        policies: dict[str, RoutingPolicy] = {each.name: each() for each in BUILT_IN}
        policies[CostPolicy.name] = CostPolicy(session_ms)
        for entry in entry_points(group=GROUP):
            try:
                policies[entry.name] = _load(entry, policies)
            except Exception as error:
                fault = f"{entry.value}: {type(error).__name__}: {error}"
                logger.warning("routing policy %s of another package is left out: %s", entry.name, fault)
        self._remedy = (
            f"there are {', '.join(policies)}; choose one of them, or install the package that registers it where the "
            f"gateway runs (entry point group {GROUP})"
        )
        if default not in policies:
            raise ValueError(f"there is no routing policy {default[:80]!r}; {self._remedy}")
        self._default = policies[default]
        self._policies = policies | {AUTO: self._default}
        self.names = [AUTO, *policies]

    def named(self, name: str) -> RoutingPolicy:
        """Return the policy with the name; the default for `Auto` and for names that this gateway does not have."""
        policy = self._policies.get(name)
        if policy is None:
            policy = self._policies[name] = self._default  # so that the log says it once
            logger.warning("there is no routing policy %r, so %s decides; %s", name[:80], policy.name, self._remedy)
        return policy


def check_policy(name: str) -> None:
    """Raise `ValueError` unless there is a policy with the name. Packages are searched for other names only."""
    if all(name != each.name for each in BUILT_IN):
        RoutingPolicies(name, 0.0)


def _load(entry: EntryPoint, known: dict[str, RoutingPolicy]) -> RoutingPolicy:
    if entry.name in known or entry.name == AUTO:
        raise ValueError(f"there is a policy {entry.name} already; register it under another name")
    policy = entry.load()()
    if not isinstance(policy, RoutingPolicy):
        raise TypeError("it is no subclass of pagemill_routing.policies.policy.RoutingPolicy")
    if policy.name != entry.name:
        raise ValueError(f"its name is {policy.name!r}; it must be that of its entry point")
    return policy
