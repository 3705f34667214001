"""A rank reads its rows and columns of every stored form: floats, grouped codes, blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from declared_families import declared

from pagemill_execution.decoders.errors import WeightsError
from pagemill_execution.decoders.fitting import check_tensors
from pagemill_execution.weights.codes import CodeKind
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.sliced import SlicedTensors
from pagemill_execution.weights.source import CutWeights
from pagemill_kernels.arrays import Array
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_kernels.linear.quantize import quantize
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.sharding.shard import shard
from pagemill_models.sharding.slices import Slices, TensorSlice

ROWS, COLUMNS = 96, 128
DECODER = declared("llama")


class Stored:
    """One matrix `weight`, in the form of `codes` or `blocks` if there are any."""

    def __init__(self, codes: GroupCodes | None = None, blocks: CodeBlocks | None = None) -> None:
        self.codes, self.blocks = codes, blocks
        self.floats = np.random.default_rng(1).standard_normal((ROWS, COLUMNS), dtype=np.float32)
        if codes is not None:
            self.floats = codes.dequantize()
        self.shapes = {"weight": (ROWS, COLUMNS), "unknown": (3,)}

    def read_into(self, name: str, out: Array) -> None:
        out[...] = self.floats

    def code_kind(self, name: str) -> CodeKind | None:
        return None if self.codes is None else CodeKind(self.codes.bits, self.codes.group_size)

    def read_codes(self, name: str) -> GroupCodes | None:
        return self.codes

    def read_blocks(self, name: str) -> CodeBlocks | None:
        return self.blocks

    def is_bfloat16(self, name: str) -> bool:
        return False

    def cut(self, slices: Any) -> CutWeights:
        return CutWeights(self, slices)

    def num_bytes(self, dtype: Any, keep_stored: bool) -> int:
        raise NotImplementedError

    def digest(self) -> str:
        return "the whole model's"


def sliced(stored: Stored, found: TensorSlice) -> SlicedTensors:
    slices: Slices = {"weight": found}
    return SlicedTensors(stored, DECODER, DECODER, slices)


def part_of(values: Array, found: TensorSlice) -> Array:
    indices = np.concatenate([np.arange(first, end) for first, end in found.ranges])
    return values[indices] if found.dimension == 0 else values[:, indices]


SLICES = [TensorSlice(0, ((3, 20), (64, 96))), TensorSlice(1, ((0, 32), (96, 128)))]
UNEVEN = TensorSlice(1, ((0, 48),))


def of_weights(weights: SlicedTensors) -> Array:
    out = np.empty(weights.shapes["weight"], dtype=np.float32)
    weights.read_into("weight", out)
    return out


@pytest.mark.parametrize("found", [*SLICES, UNEVEN])
def test_floats_are_read_by_rows_and_by_columns(found: TensorSlice) -> None:
    stored = Stored()
    weights = sliced(stored, found)
    assert np.array_equal(of_weights(weights), part_of(stored.floats, found))
    assert weights.code_kind("weight") is weights.read_codes("weight") is weights.read_blocks("weight") is None
    assert weights.digest() == "the whole model's"
    assert weights.num_bytes("float32", keep_stored=True) == 4 * (of_weights(weights).size + 3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("found", SLICES)
def test_codes_stay_quantized_where_groups_are_whole(found: TensorSlice, bits: Any) -> None:
    stored = Stored(quantize(np.random.default_rng(2).standard_normal((ROWS, COLUMNS), dtype=np.float32), bits))
    weights = sliced(stored, found)
    codes = weights.read_codes("weight")
    assert codes is not None
    assert weights.code_kind("weight") == stored.code_kind("weight")
    assert np.array_equal(codes.dequantize(), part_of(stored.floats, found))


def test_parts_of_groups_are_read_as_floats() -> None:
    stored = Stored(quantize(np.random.default_rng(2).standard_normal((ROWS, COLUMNS), dtype=np.float32), 4))
    weights = sliced(stored, UNEVEN)
    assert weights.code_kind("weight") is None
    assert weights.read_codes("weight") is None
    assert np.array_equal(of_weights(weights), stored.floats[:, :48])


@pytest.mark.parametrize("found", [*SLICES, UNEVEN])
def test_blocks_stay_blocks_where_they_are_whole(found: TensorSlice) -> None:
    data = np.random.default_rng(3).integers(0, 256, (ROWS, COLUMNS // 32, 18), dtype=np.uint8)
    blocks = sliced(Stored(blocks=CodeBlocks(4, False, data)), found).read_blocks("weight")
    if found == UNEVEN:
        assert blocks is None
        return
    assert blocks is not None
    groups = found if found.dimension == 0 else TensorSlice(1, ((0, 1), (3, 4)))
    assert np.array_equal(blocks.data, part_of(data, groups))


def test_columns_in_an_order_of_their_own_are_refused_by_name() -> None:
    codes = quantize(np.random.default_rng(2).standard_normal((ROWS, COLUMNS), dtype=np.float32), 4)
    ordered = GroupCodes(codes.bits, codes.codes, codes.scales, codes.offsets, np.arange(COLUMNS)[::-1].copy())
    by_rows = sliced(Stored(ordered), SLICES[0]).read_codes("weight")
    assert by_rows is not None
    assert by_rows.input_order is not None
    with pytest.raises(LoadError, match="`weight` stores its columns in an order of its own"):
        sliced(Stored(ordered), SLICES[1]).read_codes("weight")


def source_of(decoder: DecoderSpec, *more: str) -> Any:
    stored = Stored()
    stored.shapes = decoder.shapes() | dict.fromkeys(more, (3,))
    return stored


def test_tensors_of_other_ranks_are_left_out_and_unknown_ones_are_found() -> None:
    decoder = declared("gpt2")
    part = shard(decoder, 1, 2)
    weights = SlicedTensors(source_of(decoder), decoder, part.decoder, part.slices)
    check_tensors(part.decoder.shapes(), weights.shapes)
    assert "transformer.h.0.mlp.c_proj.bias" not in weights.shapes
    with_more = SlicedTensors(source_of(decoder, "surprise"), decoder, part.decoder, part.slices)
    with pytest.raises(WeightsError, match="unexpected: `surprise`"):
        check_tensors(part.decoder.shapes(), with_more.shapes)
