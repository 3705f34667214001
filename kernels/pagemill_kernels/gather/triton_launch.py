"""Gathers rows of a matrix in one launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pagemill_kernels.gather import triton_body

BLOCK = 1024


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Return [n, size]. table: [rows, size], neighbouring elements adjacent; ids: int64 [n], each below rows."""
    fits = ids.dtype == torch.int64 and ids.dim() == 1 and table.dim() == 2 and table.stride(1) == 1
    if not fits or ids.device != table.device:
        raise ValueError(
            f"gather: ids are {ids.dtype} {list(ids.shape)} on {ids.device}, the table is {list(table.shape)} with "
            f"strides {list(table.stride())} on {table.device}; int64 [n] and rows of neighbouring elements on one "
            "device are needed"
        )
    size = table.shape[1]
    out = torch.empty(len(ids), size, dtype=table.dtype, device=table.device)
    if out.numel():
        triton_body.gather_rows[(len(ids), triton.cdiv(size, BLOCK))](
            table_ptr=table,
            table_stride=table.stride(0),
            ids_ptr=ids.contiguous(),
            out_ptr=out,
            SIZE=size,
            BLOCK=BLOCK,
            enable_fp_fusion=True,
            num_warps=4,
        )
    return out
