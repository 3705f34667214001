"""The interface of packed linear layers; each device's launcher has its own class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class PackedLinear(Protocol):
    """A weight [out, in] and its bias in a device's own layout."""

    can_gather: bool
    """Whether rows can be read back: a tied embedding then needs no copy of its own."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight in memory."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return [tokens, out]. x: [tokens, in]."""
        ...

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add the result to `out` in place. out: contiguous [tokens, out]."""
        ...

    def gather(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, [..., in]; only if `can_gather`. ids: int64 [...], each below out."""
        ...
