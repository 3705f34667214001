"""The memory table that `pagemill serve` prints adds up."""

from __future__ import annotations

import io

from engine_ready import engine_ready
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pagemill.commands.serve import budget_table
from pagemill_execution.sizing.memory import MemoryBudget

sizes = st.integers(0, 80 * 1024**3)


@given(weights=sizes, kv=sizes, activations=sizes, process=sizes, others=sizes, free=sizes)
def test_the_shown_parts_and_the_free_memory_add_up_to_the_limit(
    weights: int, kv: int, activations: int, process: int, others: int, free: int
) -> None:
    memory = MemoryBudget(
        limit_bytes=weights + kv + activations + process + others + free,
        process_bytes=process,
        other_bytes=others,
        weight_bytes=weights,
        kv_bytes=kv,
        activation_bytes=activations,
    )
    assert memory.free_bytes == free
    shown = _shown(memory)
    assert list(shown) == [
        "Weights", "KV cache", "Activations", "Engine process", "Other processes", "Free", "Limit",
    ]  # fmt: skip
    *parts, limit = shown.values()
    assert sum(parts) == limit
    assert abs(shown["Free"] - free / 2**20) <= 3


def _shown(memory: MemoryBudget) -> dict[str, int]:
    ready = engine_ready(weight_bytes=memory.weight_bytes, kv_bytes_per_token=1024, memory=memory)
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(budget_table(ready, memory))
    assert isinstance(console.file, io.StringIO)
    rows = [line.split("│") for line in console.file.getvalue().splitlines() if "│" in line]
    return {cells[0].strip(): int(cells[1].replace(",", "")) for cells in rows}
