"""What one layer keeps of the tokens before, as part of its declaration. How layers become cache kinds is
`spec.model_spec`'s part."""

from __future__ import annotations

import math

import msgspec


class VectorsSpec(msgspec.Struct, frozen=True):
    """What a layer caches of each token: `heads` vectors of `size` values, which the last `window` tokens read."""

    heads: int
    size: int
    window: int | None = None


class StateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a recurrent layer keeps: a state at a block boundary, and the inputs of the tokens since.

    All values are float32. A convolution keeps the last `width` - 1 values of each of its channels as part of the
    state.
    """

    parts: tuple[tuple[int, ...], ...] = ()
    """Shapes of the arrays that are the state."""
    inputs_per_token: int = 0
    """Values of a token from which the state behind it is computed, without those of the convolution."""
    channels: int = 0
    width: int = 1

    @property
    def num_values(self) -> int:
        return sum(math.prod(shape) for shape in self.parts) + (self.width - 1) * self.channels

    def num_row_values(self, block_size: int, most_proposed: int) -> int:
        """Return the values that a running sequence keeps of the tokens since its state: those of a block, and those
        that may be proposed. The convolution needs only its last inputs."""
        of_tokens = (block_size + most_proposed) * self.inputs_per_token
        return of_tokens + (self.width - 1 + most_proposed) * self.channels


LayerCacheSpec = VectorsSpec | StateSpec
"""What a layer keeps of the tokens before."""
