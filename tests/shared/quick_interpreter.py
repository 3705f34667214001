"""Makes Triton's interpreter quicker: what it prepares anew for every operation of every program is prepared once.

This changes how long interpreted kernels take and nothing that they compute. `triton_device` calls it where there is no
device, and tests call it in processes of their own; it imports nothing but Triton. On a device it must not be called:
Triton's compiler uses the same types.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from triton.runtime import interpreter

core = interpreter.tl.core
TRITONS = {
    "call": interpreter.InterpretedFunction.__call__,
    "numpy type": interpreter._get_np_dtype,
    "block type": core.block_type.__init__,
    "tensor": core.tensor.__init__,
    "equal": core.tuple.__eq__,
}
"""What Triton does itself."""
patched_modules: set[str] = set()
numpy_types: dict[str, Any] = {}
block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
shapes: dict[str, tuple[Any, Any]] = {}


def speed_up_interpreter() -> None:
    interpreter.InterpretedFunction.__call__ = call_from_a_kernel
    interpreter._get_np_dtype = numpy_type
    core.block_type.__init__ = make_block_type
    core.tensor.__init__ = make_tensor
    core.tuple.__eq__ = equal
    # Each sum of integers would be computed three times, as only debug builds of a kernel do.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def call_from_a_kernel(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The interpreter patches its language whenever one function calls another: needed once for each module, and for
    ours the launch does it."""
    module = function.fn.__module__
    if module.startswith("pagemill_kernels") or module in patched_modules:
        return function.rewrite()(*args, **kwargs)
    patched_modules.add(module)
    return TRITONS["call"](function, *args, **kwargs)


def numpy_type(kind: Any) -> Any:
    """Return numpy's type; the name of Triton's says whether it is of pointers or of blocks, and of what."""
    name = kind.name
    if name not in numpy_types:
        numpy_types[name] = TRITONS["numpy type"](kind)
    return numpy_types[name]


def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
    key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
    made = block_types.get(key)
    if made is None:
        TRITONS["block type"](self, element_ty, shape)
        block_types[key] = dict(self.__dict__)
    else:
        self.__dict__.update(made)


def make_tensor(self: Any, handle: Any, kind: Any) -> None:
    found = shapes.get(kind.name)
    if found is None:
        TRITONS["tensor"](self, handle, kind)
        shapes[kind.name] = (self.shape, self.numel)
        return
    self.shape, self.numel = found
    self.handle, self.type, self.dtype = handle, kind, kind.scalar


def equal(self: Any, other: Any) -> Any:
    """Compare shapes as they are: sizes known at compile time equal the same numbers."""
    if isinstance(other, core.tuple):
        return core.constexpr(self.values == other.values)
    return core.constexpr(self.values == other) if isinstance(other, list) else TRITONS["equal"](self, other)
