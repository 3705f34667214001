"""Model names claimed twice, over all watched deployments: who holds a name, and whose key that changes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.plan.planner import name_conflicts
from pagemill_operator.plan.types import Problem


@dataclass(frozen=True)
class Claim:
    """What one deployment wants to be called, read from the raw object: it may be one that cannot be planned."""

    key: str
    names: tuple[str, ...]
    weight: int | None
    created: str
    """Creation time, RFC 3339 in UTC: sorts by age."""


def claim_of(key: str, owner: Manifest) -> Claim:
    spec = owner.get("spec", {})
    model = spec.get("model", {})
    name = model.get("name") or owner["metadata"]["name"]
    weight = spec.get("routing", {}).get("weight")
    return Claim(key, (name, *model.get("aliases", [])), weight, owner["metadata"].get("creationTimestamp", ""))


class Names:
    """The claims of all deployments, and the conflicts among them."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        self._conflicts: dict[str, Problem] = {}

    def conflict(self, key: str) -> Problem | None:
        return self._conflicts.get(key)

    def claim(self, claim: Claim) -> set[str]:
        """Keys whose conflicts have changed by it."""
        if self._claims.get(claim.key) == claim:
            return set()
        self._claims[claim.key] = claim
        return self._recompute()

    def drop(self, key: str) -> set[str]:
        return self._recompute() if self._claims.pop(key, None) else set()

    def _recompute(self) -> set[str]:
        oldest_first = sorted(self._claims.values(), key=lambda claim: (claim.created, *claim.key.split("/")))
        before, self._conflicts = self._conflicts, name_conflicts(oldest_first)
        return {key for key in before.keys() | self._conflicts.keys() if before.get(key) != self._conflicts.get(key)}
