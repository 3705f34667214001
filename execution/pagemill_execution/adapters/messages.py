"""What rank 0 says of adapters to other ranks: `runners.ranks.messages` encodes it beside plans, `ranks` obeys it."""

from __future__ import annotations

import msgspec


class AdapterPiece(msgspec.Struct, tag="piece", array_like=True):
    """What comes next of a file of an adapter, for ranks that cannot read rank 0's folders."""

    number: int
    file: str
    data: bytes


class ReadAdapter(msgspec.Struct, tag="adapter", array_like=True):
    number: int
    folder: str
    """Empty: its files came before, as pieces."""
    digest: str
    dropped: list[int]
    """The numbers of adapters that rank 0 has no longer."""


AdapterMessage = AdapterPiece | ReadAdapter
