"""What every packed linear layer can do; each device's launcher has its own class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class PackedLinear(Protocol):
    """A weight [out, in] and its bias in a device's own layout."""

    can_gather: bool
    """Rows can be read back: a tied embedding then needs no copy of its own."""

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out]."""
        ...

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out += the result, in place. out: contiguous [tokens, out]."""
        ...

    def gather(self, ids: Tensor) -> Tensor:
        """Rows of the weight. ids: int64 [...], each below out. Returns [..., in]; only where `can_gather`."""
        ...
