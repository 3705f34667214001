"""Routes of dialects that generate nothing: lists and descriptions of models.

Engines and gateways build these routes from `PAGES` and decide which models a caller may see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagemill_api.dialects.transport import RequestInfo
from pagemill_api.openai.render import ModelCard
from pagemill_protocol.errors import PagemillError, model_not_found


class PageRequest(NamedTuple):
    cards: Sequence[ModelCard]
    """The models that the caller may use."""
    info: RequestInfo
    raw: bytes
    version: str
    """Version of the server."""

    def card(self, name: str) -> ModelCard:
        """Return the card of a model. Raises `PagemillError` 404."""
        for card in self.cards:
            if card.id == name:
                return card
        raise model_not_found(name, [card.id for card in self.cards])


class Page(NamedTuple):
    path: str
    body: Callable[[PageRequest], bytes]
    """Returns the body. Raises `PagemillError`."""
    error_body: Callable[[PagemillError], bytes]
    method: str = "GET"
