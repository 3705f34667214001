"""A KV cache in numbers: how many blocks are held, free and cached, and which decodes need one at which step.

Follows `pagemill_engine.kv` without a block: content is known by the row or session it belongs to, and what is cached
of one is a run of blocks that loses its end first. Blocks never used or worthless are taken first, then cached ones,
least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict

Owner = int | tuple[int]
"""Whose content it is: a session's, or that of a row without one."""


class KVCounts:
    def __init__(self, num_blocks: int, block_size: int, *, caches: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        """That can be had now, cached ones included."""
        self.num_cached = 0
        """Free, with content that may be found."""
        self._caches = caches
        self._cached: OrderedDict[Owner, int] = OrderedDict()
        """Blocks by owner, the least recently used first."""
        self._held: dict[Owner, int] = {}
        """Full blocks of prompts that were computed and still run, by owner."""
        self._changed: dict[int, None] = {}
        """Sessions of which more or less may be found than before."""
        self._num_nameless = 0
        self._no_owner = self.new_owner()
        """Of neighbours in age that no request will look for."""
        self._borders = [0] * block_size
        """Decoding rows by the step, modulo the block size, at which they need a further block."""

    def new_owner(self) -> Owner:
        """Of what has no session."""
        self._num_nameless += 1
        return (self._num_nameless,)

    @property
    def num_active(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- taken and given back ------------------------------------------------------------------------------------

    def take(self, num_blocks: int) -> None:
        """The caller has seen that they are free."""
        self.num_free -= num_blocks
        missing = self.num_cached - self.num_free
        if missing <= 0:
            return
        self.num_cached = self.num_free
        while missing:
            owner, count = next(iter(self._cached.items()))
            self._note(owner)
            if count > missing:
                self._cached[owner] = count - missing
                return
            del self._cached[owner]
            missing -= count

    def give_back(self, num_blocks: int, num_computed_tokens: int, owner: Owner | None) -> None:
        """Full blocks stay to be found; `owner` None: no request will look for them, but they age with the others."""
        self.num_free += num_blocks
        if owner is not None:
            self._held.pop(owner, None)
            self._note(owner)
        num_full = num_computed_tokens // self.block_size if self._caches else 0
        if not num_full:
            return
        self.num_cached += num_full
        if owner is None:
            if next(reversed(self._cached), None) != self._no_owner:
                self._no_owner = self.new_owner()
            self._cached[self._no_owner] = self._cached.get(self._no_owner, 0) + num_full
            return
        self.num_cached -= self._cached.pop(owner, 0)  # the same content again: it is found once
        self._cached[owner] = num_full

    def num_cached_of(self, owner: Owner) -> int:
        """Blocks."""
        return self._cached.get(owner, 0)

    def hold(self, owner: Owner, num_computed_tokens: int) -> None:
        """A row has computed its prompt: others find it while it runs."""
        if self._caches and isinstance(owner, int):
            self._held[owner] = num_computed_tokens // self.block_size
            self._note(owner)

    def num_findable_of(self, owner: Owner) -> int:
        """Blocks, whether a row holds them or not."""
        return max(self._held.get(owner, 0), self._cached.get(owner, 0))

    def take_changed(self) -> list[int]:
        """Sessions of which more or less may be found than when this was called last."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def revive(self, owner: Owner, num_blocks: int) -> None:
        """A row takes the first blocks of what is cached of its owner; the rest is found no more, and ages."""
        self.num_free -= num_blocks
        self.num_cached -= num_blocks
        rest = self._cached[owner] - num_blocks
        del self._cached[owner]
        if rest:
            self._cached[self.new_owner()] = rest
        self.hold(owner, num_blocks * self.block_size)  # what is in use is found all the same

    def _note(self, owner: Owner) -> None:
        if isinstance(owner, int):
            self._changed[owner] = None

    # -- what decodes will need ----------------------------------------------------------------------------------

    def watch(self, step: int, num_computed_tokens: int, sign: int = 1) -> None:
        """A row decodes from `step` on (or no more, with -1) and has so many tokens by then."""
        self._borders[(step - num_computed_tokens) % self.block_size] += sign

    def needed_at(self, step: int) -> int:
        return self._borders[step % self.block_size]

    def needed_by(self, step: int, num_steps: int, num_rows: int) -> int:
        """Blocks that `num_steps` steps from `step` on take."""
        borders = self._borders
        laps, rest = divmod(num_steps, self.block_size)
        first = step % self.block_size
        over = first + rest - self.block_size
        taken = sum(borders[first:]) + sum(borders[:over]) if over > 0 else sum(borders[first : first + rest])
        return laps * num_rows + taken

    def steps_until_full(self, step: int, num_rows: int, most: int) -> int:
        """How many steps from `step` on find their blocks free, at most `most`."""
        if (most // self.block_size + 1) * num_rows <= self.num_free:
            return most
        if self.needed_by(step, most, num_rows) <= self.num_free:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            if self.needed_by(step, middle, num_rows) <= self.num_free:
                low = middle
            else:
                high = middle
        return low
