"""What an adapter's files contain: which tensors add to which linear layers. Values are read by the engine.

`folder` makes it of PEFT's folders, `gguf_adapter` of llama.cpp's files.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pagemill_models.adapters.errors import AdapterError, unsupported
from pagemill_models.adapters.limits import MAX_RANK
from pagemill_models.files.safetensors_header import TensorHeader
from pagemill_models.sharding.linears import LinearUse


class LowRank(NamedTuple):
    """What two tensors add to some rows of a linear layer: scale * B (A x)."""

    use: LinearUse
    first_row: int
    a: TensorHeader
    """Stored [rank, in]; of stacked experts [experts * rank, in]."""
    b: TensorHeader
    """Stored [out, rank]; of stacked experts [out, rank * experts], the expert fastest."""
    rank: int
    scale: float
    expert: int | None = None
    """Index in tensors of stacked experts."""
    num_experts: int = 1
    swapped: bool = False
    """Whether A and B are those of the transposed matrix, as early versions of PEFT wrote them for stacked experts."""
    is_converted: bool = False
    """Whether the tensors are those of a GGUF file: of an embedding A is stored [rows, rank]; of experts both have one
    more dimension; rows of B are in the order of llama.cpp's converters."""
    heads: int = 0
    """Heads whose rotary halves are interleaved in the rows of B; 0: none are."""


class SavedCopy(NamedTuple):
    """A copy of one of the base's matrices."""

    header: TensorHeader
    stored_name: str


class AdapterFiles(NamedTuple):
    path: Path
    base: str | None
    """The base model's name, as the trainer wrote it."""
    parts: list[LowRank]
    copies: list[SavedCopy]
    tensors: list[TensorHeader]


def check_rank(name: str, rank: int, max_rank: int) -> None:
    """Raise `AdapterError` for a rank that the engine has no room for."""
    if rank > max_rank:
        remedy = f"Raise max_lora_rank, up to {MAX_RANK}." if rank <= MAX_RANK else f"At most {MAX_RANK} is served."
        raise AdapterError(
            "AdapterTooLarge", f"`{name}` has rank {rank}; this engine serves ranks up to {max_rank}. {remedy}"
        )


def check_once(parts: list[LowRank]) -> None:
    seen: set[tuple[int, int]] = set()
    for part in parts:
        if (part.use.number, part.first_row) in seen:
            raise refused_tensor(part.a, "adapts a matrix that another tensor adapts as well")
        seen.add((part.use.number, part.first_row))


def other_shape(header: TensorHeader, wanted: tuple[int, ...]) -> AdapterError:
    return AdapterError(
        "AdapterOfAnotherModel",
        f"Tensor `{header.name}` has shape {list(header.shape)}; with this model and the settings of the adapter it "
        f"must be {list(wanted)}. Serve the adapter with the model that it was trained on.",
    )


def refused_tensor(header: TensorHeader, why: str) -> AdapterError:
    return unsupported(f"Tensor `{header.name}` {why}.")
