"""Which engine would cost least to remove: the one that holds least for its running requests. Pure.

Neighbours: `book` keeps what gateways tell; `backends` remove replicas in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from pagemill_operator.autoscaler.signals import weight
from pagemill_protocol.load import EngineHeld

Item = TypeVar("Item")


def emptiest_first(items: Iterable[Item], id_of: Callable[[Item], str], held: Mapping[str, EngineHeld]) -> list[Item]:
    """Whom nobody hears comes last: what it holds is not known. Equals keep their order."""

    def order(item: Item) -> tuple[bool, tuple[int, int]]:
        engine = held.get(id_of(item))
        return engine is None, weight(engine) if engine is not None else (0, 0)

    return sorted(items, key=order)
