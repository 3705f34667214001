"""The scaling policies by name: the operator's own, and those that installed packages register.

A package registers a policy as an entry point of group `pagemill.scaling_policies`. The entry point's name is the
policy's name, and its object is a class that can be made without arguments. Where a package cannot be loaded, only its
own policies are unavailable. Installed packages are searched once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from pagemill_operator.autoscaler.demand import DemandPolicy
from pagemill_operator.autoscaler.policy import ScalingPolicy
from pagemill_operator.autoscaler.target_tracking import TargetTracking

logger = logging.getLogger("pagemill.operator.scaling")

GROUP = "pagemill.scaling_policies"
BUILT_IN: Mapping[str, ScalingPolicy[Any]] = {policy.name: policy for policy in (DemandPolicy(), TargetTracking())}


class UnknownPolicyError(LookupError):
    """No policy of that name is installed, or it cannot be loaded; the message says which, and names the others."""


class RegisteredPolicies(NamedTuple):
    """All policies that were found."""

    policies: Mapping[str, ScalingPolicy[Any]]
    """Policies that can be used, by name."""
    faults: Mapping[str, str]
    """Errors of registered policies that cannot be used, by the policy's name."""


@cache
def registered() -> RegisteredPolicies:
    """Return the operator's policies and those of installed packages."""
    policies, faults = dict(BUILT_IN), {}
    for entry in entry_points(group=GROUP):
        try:
            policies[entry.name] = _load(entry, policies)
        except Exception as error:
            faults[entry.name] = f"{entry.value}: {type(error).__name__}: {error}"
            logger.warning("scaling policy %s of another package is left out: %s", entry.name, faults[entry.name])
    return RegisteredPolicies(policies, {name: fault for name, fault in faults.items() if name not in policies})


def find_policy(name: str) -> ScalingPolicy[Any]:
    """Return the policy of that name. Raises `UnknownPolicyError`."""
    known = registered()
    if name in known.policies:
        return known.policies[name]
    if name in known.faults:
        raise UnknownPolicyError(f"scaling policy {name} cannot be loaded: {known.faults[name]}")
    raise UnknownPolicyError(
        f"there is no scaling policy {name}; there are {', '.join(known.policies)}; choose one of them, or install "
        f"the package that registers it (entry point group {GROUP})"
    )


def _load(entry: EntryPoint, known: Mapping[str, ScalingPolicy[Any]]) -> ScalingPolicy[Any]:
    if entry.name in known:
        raise ValueError(f"there is a policy {entry.name} already; register it under another name")
    policy: ScalingPolicy[Any] = entry.load()()
    if policy.name != entry.name:
        raise ValueError(f"its name is {policy.name!r}; it must be that of its entry point")
    return policy
