"""The Triton kernel that marks how far a device has come; `device_marks` launches it."""

from __future__ import annotations

import triton
import triton.language as tl

EXCHANGE_BITS: tl.constexpr = tl.constexpr(20)
STEP: tl.constexpr = tl.constexpr(0)
EXCHANGE: tl.constexpr = tl.constexpr(1)
LEAVE: tl.constexpr = tl.constexpr(2)
STEP_END: tl.constexpr = tl.constexpr(3)
"""The kinds of marks."""


@triton.jit(do_not_specialize=["step"])
def mark(state_ptr, seen_ptr, step, KIND: tl.constexpr):
    """Change the state, int64 [4], and show it in memory of the host."""
    place = tl.load(state_ptr)
    computed_ns = tl.load(state_ptr + 1)
    num_steps = tl.load(state_ptr + 2)
    running_ns = tl.load(state_ptr + 3)
    now_ns = tl.extra.cuda.globaltimer()
    if KIND == STEP:
        place = step.to(tl.int64) << EXCHANGE_BITS
        running_ns = 0 - now_ns
    elif KIND == EXCHANGE:
        place += 1
        running_ns += now_ns
    elif KIND == LEAVE:
        running_ns -= now_ns
    else:
        place = place | ((1 << EXCHANGE_BITS) - 1)
        computed_ns += running_ns + now_ns
        num_steps += 1
    tl.store(state_ptr, place)
    tl.store(state_ptr + 1, computed_ns)
    tl.store(state_ptr + 2, num_steps)
    tl.store(state_ptr + 3, running_ns)
    tl.store(seen_ptr, place)
    tl.store(seen_ptr + 1, computed_ns)
    tl.store(seen_ptr + 2, num_steps)
