"""bfloat16 in numpy arrays: values equal torch's, and both share memory."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pagemill_kernels.arrays import rounded, widened
from pagemill_kernels.torch_arrays import from_torch, to_torch

ANY_FLOATS = arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32))


@given(ANY_FLOATS)
def test_rounding_to_bfloat16_equals_torchs(values: np.ndarray) -> None:
    expected = from_torch(torch.from_numpy(values).to(torch.bfloat16))
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(rounded(values)[numbers], expected[numbers])
    assert np.isnan(widened(rounded(values))[~numbers]).all()


@given(arrays(np.uint16, st.integers(1, 40)))
def test_widening_equals_torchs(bits: np.ndarray) -> None:
    expected = to_torch(bits).float().numpy()
    np.testing.assert_array_equal(widened(bits).view(np.uint32), expected.view(np.uint32))


def test_numpy_and_torch_share_memory() -> None:
    array = np.zeros((2, 3), dtype=np.uint16)
    tensor = to_torch(array)
    tensor[1, 2] = 1.0
    assert widened(array).tolist() == [[0, 0, 0], [0, 0, 1]]
    assert from_torch(tensor).ctypes.data == array.ctypes.data
