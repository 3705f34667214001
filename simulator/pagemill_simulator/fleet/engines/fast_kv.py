"""A KV cache as counters: how many blocks are held, free and cached, and which decodes need a block at which step.

It follows `pagemill_engine.kv` without blocks: content is identified by its row or session, and the cached content of
one is a run of blocks that loses its end first. Unused or worthless blocks are taken first, then cached ones, least
recently used first.
"""

from __future__ import annotations

from collections import OrderedDict

Owner = int | tuple[int]
"""The owner of content: a session, or a row without one."""


class KVCounts:
    def __init__(self, num_blocks: int, block_size: int, *, caches: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        """Available blocks, cached ones included."""
        self.num_cached = 0
        """Free blocks with reusable content."""
        self._caches = caches
        self._cached: OrderedDict[Owner, int] = OrderedDict()
        """Cached blocks by owner, the least recently used first."""
        self._held: dict[Owner, int] = {}
        """Full blocks of computed prompts that still run, by owner."""
        self._changed: dict[int, None] = {}
        """Sessions whose number of findable blocks has changed."""
        self._num_nameless = 0
        self._no_owner = self.new_owner()
        """Owner of adjacent cached blocks that no request will look for."""
        self._borders = [0] * block_size
        """Number of decoding rows by the step, modulo the block size, at which they need another block."""

    def new_owner(self) -> Owner:
        """Return an owner for content without a session."""
        self._num_nameless += 1
        return (self._num_nameless,)

    @property
    def num_active(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- taking and freeing blocks ---------------------------------------------------------------------------------

    def take(self, num_blocks: int) -> None:
        """Take blocks, which the caller must know to be free."""
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
        """Free blocks; full ones stay cached. Without an `owner` no request will find them, but they age like
        others.
        """
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
        self.num_cached -= self._cached.pop(owner, 0)  # equal content is cached once
        self._cached[owner] = num_full

    def resize(self, num_blocks: int) -> None:
        """Add so many unused blocks, or with a negative number give them away, as if they were taken."""
        if num_blocks < 0:
            self.take(-num_blocks)
        else:
            self.num_free += num_blocks
        self.num_blocks += num_blocks

    def num_cached_of(self, owner: Owner) -> int:
        """Return the number of cached blocks of the owner."""
        return self._cached.get(owner, 0)

    def hold(self, owner: Owner, num_computed_tokens: int) -> None:
        """Note that a row has computed its prompt: others can reuse it while it runs."""
        if self._caches and isinstance(owner, int):
            self._held[owner] = num_computed_tokens // self.block_size
            self._note(owner)

    def num_findable_of(self, owner: Owner) -> int:
        """Return the number of reusable blocks, whether a row holds them or not."""
        return max(self._held.get(owner, 0), self._cached.get(owner, 0))

    def is_held(self, owner: Owner) -> bool:
        """Whether a row has computed the owner's prompt and still runs."""
        return owner in self._held

    def take_changed(self) -> list[int]:
        """Return the sessions whose reusable blocks have changed since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def revive(self, owner: Owner, num_blocks: int) -> None:
        """Give a row the first cached blocks of its owner; the rest cannot be found any more, and ages."""
        self.num_free -= num_blocks
        self.num_cached -= num_blocks
        rest = self._cached[owner] - num_blocks
        del self._cached[owner]
        if rest:
            self._cached[self.new_owner()] = rest
        self.hold(owner, num_blocks * self.block_size)  # blocks in use can still be found

    def _note(self, owner: Owner) -> None:
        if isinstance(owner, int):
            self._changed[owner] = None

    # -- blocks that decodes will need ----------------------------------------------------------------------------

    def watch(self, step: int, num_computed_tokens: int, sign: int = 1) -> None:
        """Note that a row decodes from `step` on (with -1: no more) and has so many computed tokens then."""
        self._borders[(step - num_computed_tokens) % self.block_size] += sign

    def needed_at(self, step: int) -> int:
        return self._borders[step % self.block_size]

    def needed_by(self, step: int, num_steps: int, num_rows: int) -> int:
        """Return the blocks that `num_steps` steps from `step` on take."""
        borders = self._borders
        laps, rest = divmod(num_steps, self.block_size)
        first = step % self.block_size
        over = first + rest - self.block_size
        taken = sum(borders[first:]) + sum(borders[:over]) if over > 0 else sum(borders[first : first + rest])
        return laps * num_rows + taken

    def steps_until_full(self, step: int, num_rows: int, most: int, num_free: int) -> int:
        """Return how many steps from `step` on find their blocks among `num_free`, at most `most`."""
        if (most // self.block_size + 1) * num_rows <= num_free:
            return most
        if self.needed_by(step, most, num_rows) <= num_free:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            if self.needed_by(step, middle, num_rows) <= num_free:
                low = middle
            else:
                high = middle
        return low
