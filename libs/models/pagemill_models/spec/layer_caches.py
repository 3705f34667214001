"""The cache kinds of a model, derived from its declaration: a family adds nothing.

What a kind frees and what a hit requires is `pagemill_protocol.report.cache_kinds`.
"""

from __future__ import annotations

from collections.abc import Callable

from pagemill_models.declaration.declaration import AnyAttentionSpec, DecoderSpec
from pagemill_protocol.report.cache_kinds import CacheKind


def kinds_of(decoder: DecoderSpec, block_size: int, token_bytes: Callable[[int], int], longest: int) -> list[CacheKind]:
    """Return the kinds of the decoder's layers, those that keep everything first.

    `token_bytes`: bytes of a cached vector of so many values. `longest`: the most tokens of a sequence; a window of as
    many tokens frees nothing and is none.
    """
    layers: dict[int | None, list[int]] = {}
    num_bytes: dict[int | None, int] = {}
    for number, layer in enumerate(decoder.layers):
        for block in layer.blocks():
            if not isinstance(block, AnyAttentionSpec):
                continue
            window = block.window if block.window is not None and block.window < longest else None
            layers.setdefault(window, []).append(number)
            of_block = block_size * block.cache_heads * token_bytes(block.head_dim)
            num_bytes[window] = num_bytes.get(window, 0) + of_block
    ordered = sorted(layers, key=lambda window: -longest if window is None else -window)
    return [
        CacheKind("full" if window is None else f"window-{window}", window, tuple(layers[window]), num_bytes[window])
        for window in ordered
    ]
