"""What is prepared once for Triton's interpreter is what Triton prepares each time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_interpreter import TRITONS, core, equal, make_block_type, make_tensor, numpy_type

from examples import num_examples

SCALARS = [core.int1, core.int32, core.uint8, core.int64, core.float16, core.bfloat16, core.float32, core.float8e5]
elements = st.one_of(
    st.sampled_from(SCALARS),
    st.builds(core.pointer_type, st.sampled_from(SCALARS), st.sampled_from(["global", "shared"]), st.booleans()),
)
sizes = st.lists(st.sampled_from([1, 2, 16, 64]), min_size=1, max_size=3)
as_shape = st.sampled_from([list, core.tuple, lambda sizes: [core.constexpr(size) for size in sizes]])


def block_type(make: Any, element: Any, shape: Any) -> Any:
    made = object.__new__(core.block_type)
    make(made, element, shape)
    return made


def facts(made: Any) -> tuple[Any, ...]:
    return (made.element_ty, made.shape.values, made.numel, made.name)


@settings(max_examples=num_examples(60))
@given(elements, sizes, as_shape)
def test_types_and_tensors_are_those_of_triton(element: Any, sizes: list[int], as_shape: Any) -> None:
    expected = block_type(TRITONS["block type"], element, as_shape(sizes))
    for _ in range(2):
        made = block_type(make_block_type, element, as_shape(sizes))
        assert facts(made) == facts(expected)
        assert numpy_type(made) == TRITONS["numpy type"](expected)
        for kind in (made, element):
            ours, tritons = object.__new__(core.tensor), object.__new__(core.tensor)
            make_tensor(ours, "handle", kind)
            TRITONS["tensor"](tritons, "handle", kind)
            assert vars(ours).keys() == vars(tritons).keys()
            assert [size.value for size in ours.shape] == [size.value for size in tritons.shape]
            assert (ours.numel.value, ours.type, ours.dtype) == (tritons.numel.value, kind, kind.scalar)
            assert ours.handle == "handle"


@settings(max_examples=num_examples(60))
@given(sizes, sizes, st.booleans(), st.sampled_from([list, tuple, core.tuple]))
def test_shapes_are_equal_where_triton_finds_them_equal(left: list[int], right: list[int], same: bool, of: Any) -> None:
    other = left if same else right
    for values in (other, [core.constexpr(size) for size in other]):
        found = equal(core.tuple(left), of(values))
        assert found.value == TRITONS["equal"](core.tuple(left), of(values)).value == (left == other)


def test_a_size_that_is_no_power_of_two_is_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            block_type(make_block_type, core.int32, [3])
