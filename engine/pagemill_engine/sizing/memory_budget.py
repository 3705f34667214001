"""The planned division of the memory: a message from the engine process to its server, and what the planner shows."""

from __future__ import annotations

import msgspec


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The division of the usable memory: all parts and the free memory add up to the limit."""

    limit_bytes: int
    """Memory of the machine or of the container, whichever is less."""
    process_bytes: int
    """Memory of the engine process before it loads: interpreter and libraries, without pages of files."""
    other_bytes: int
    """Other memory in use at that time, including the server process."""
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    """Activations of the largest step, from the model's shapes or measured."""
    measured: bool = False
    """Whether `activation_bytes` was measured in steps, with rows, libraries and recorded decodes."""

    @property
    def free_bytes(self) -> int:
        """Memory that is left when cache and step have their largest size; negative if they do not fit."""
        used = self.process_bytes + self.other_bytes
        return self.limit_bytes - used - self.weight_bytes - self.kv_bytes - self.activation_bytes
