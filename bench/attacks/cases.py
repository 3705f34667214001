"""The cases of `bench/attack.py`: each is one attack on one port, made by a function of this folder's other modules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from attacks.site import Site

Attack = Callable[[Site, str], Awaitable[str]]
"""Attacks a site at a port, such as `gateway data`; returns a note for the table. Raises `Broken`."""


class Broken(AssertionError):
    """A promise that the attack was to test is not kept."""


@dataclass(frozen=True)
class Case:
    kind: str
    port: str
    attack: Attack
    full: bool
    """Whether only the whole grid has it, not `make attack`."""
    ends_servers: bool
    """Whether the attack itself ends servers, so that the honest tenant's requests fail with them."""

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.port}: {self.attack.__name__.replace('_', ' ')}"


CASES: list[Case] = []


def case(
    kind: str, *ports: str, only_grid: tuple[str, ...] = (), ends_servers: bool = False
) -> Callable[[Attack], Attack]:
    """Register an attack for these ports, and for `only_grid` in the whole grid only."""

    def register(attack: Attack) -> Attack:
        CASES.extend(Case(kind, port, attack, False, ends_servers) for port in ports)
        CASES.extend(Case(kind, port, attack, True, ends_servers) for port in only_grid)
        return attack

    return register


def expect(kept: object, promise: str) -> None:
    if not kept:
        raise Broken(promise)
