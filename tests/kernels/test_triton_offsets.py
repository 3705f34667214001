"""Rows, blocks and codes beyond the 2^31st element: kernels use 64 bits for every offset that is a product of sizes.

The tests run in the interpreter only: the memory is a sparse file. On a device, `test_triton_attention` uses real
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_batches import batch_of
from code_kinds import group_codes
from triton_device import CODE_TYPES, DEVICE, HAS_GPU, random, sparse

from pagemill_kernels.activation import triton_launch as activation
from pagemill_kernels.gather import triton_launch as gather
from pagemill_kernels.linear import triton_launch as linear
from pagemill_kernels.linear.quantize import quantize
from pagemill_kernels.norm import triton_launch as norm
from pagemill_kernels.paged_attention import triton_launch as attention
from pagemill_kernels.scaled_linear import triton_launch as scaled
from pagemill_kernels.scaled_linear.channels import ChannelCodes, quantize_channels

pytestmark = pytest.mark.skipif(HAS_GPU, reason="the memory is virtual")

SIZE, STRIDE = 64, 2**30
"""The last of three rows starts at the 2^31st element, while the stride itself has 32 bits."""
WEIGHT = random(40, SIZE, seed=1)


def attend(query: torch.Tensor) -> torch.Tensor:
    """Compute attention of three tokens of one request."""
    batch = batch_of([(3, 20)], np.array([[1, 0]], dtype=np.int32), 1, SIZE)
    plan = attention.plan_attention(batch, None, torch.float32, DEVICE)
    return attention.paged_attention(query[:, None], random(2, 2, 16, SIZE, seed=2), plan, 0.1)


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "RMS norm": lambda x: norm.rms_norm(x, WEIGHT[0], 1e-5),
    "layer norm": lambda x: norm.layer_norm(x, WEIGHT[0], WEIGHT[1], 1e-5),
    "gated activation": activation.silu_and_mul,
    "gather": lambda x: gather.gather_rows(x, torch.tensor([2, 0, 1])),
    "4-bit weights": lambda x: linear.pack_codes(quantize(WEIGHT.numpy(), 4), None)(x),
    "8-bit weights": lambda x: linear.pack_codes(quantize(WEIGHT.numpy(), 8), None)(x),
    "int8 by int8": lambda x: scaled.pack_w8a8(WEIGHT, None)(x),
    "fp8 by fp8": lambda x: scaled.pack_fp8(WEIGHT, None)(x),
    "attention": attend,
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_rows_that_start_beyond_the_2_31st_element_are_read(
    operation: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    near = random(3, SIZE)
    far = sparse(tmp_path / "x", 2 * STRIDE + SIZE, torch.float32).as_strided((3, SIZE), (STRIDE, 1))
    far.copy_(near)
    assert torch.equal(operation(far), operation(near))


@pytest.mark.full
def test_group_quantized_weights_beyond_the_2_31st_element_are_read(tmp_path: Path) -> None:
    num_rows, width = 2**15 + 2, 2**16
    codes = sparse(tmp_path / "codes", num_rows * width, torch.int8).view(num_rows, width)
    scales = sparse(tmp_path / "scales", num_rows * width // 32, torch.float32).view(num_rows, width // 32)
    codes[-1, -3:], scales[-1, -1] = torch.tensor([5, -7, 9]), 0.5
    table = linear.pack_codes(group_codes(8, codes, scales, None), None)
    assert table.gather(torch.tensor([num_rows - 1]))[0, -3:].tolist() == [2.5, -3.5, 4.5]


@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_channel_quantized_weights_beyond_the_2_31st_element_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    num_rows, width = 2**15 + 2, 2**16
    codes = sparse(tmp_path / "codes", num_rows * width, dtype).view(num_rows, width)
    codes[-1, -SIZE:] = quantize_channels(WEIGHT, dtype).codes[2]
    table = scaled.ScaledLinear(ChannelCodes(codes, torch.ones(num_rows)), None)
    assert torch.equal(table.gather(torch.tensor([num_rows - 1]))[0, -SIZE:], codes[-1, -SIZE:].float())
