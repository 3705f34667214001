"""Parts of stored tensors: which rows or columns a rank reads, and the linear layers that they make.

`shard` decides which units a rank has; this module finds where files store them, in matrices of any order of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import msgspec

from pagemill_models.declaration.declaration import LinearSpec, MatrixSpec, RowGroups

Range = tuple[int, int]
"""First index, and the one behind the last."""
Ranges = tuple[Range, ...]
"""Ascending and apart."""


class TensorSlice(NamedTuple):
    """The rows (dimension 0), columns (1) or planes of columns (2) of a tensor that are read, in their stored order."""

    dimension: Literal[0, 1, 2]
    ranges: Ranges

    @property
    def size(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def is_of_units(self, size: int) -> bool:
        """Whether it consists of whole units of so many rows or columns."""
        return all(first % size == 0 and end % size == 0 for first, end in self.ranges)

    def in_units(self, size: int) -> tuple[TensorSlice, TensorSlice]:
        """Return the whole units of so many rows or columns that contain it, and what it is of these."""
        covers: list[Range] = []
        for first, end in self.ranges:
            first, end = first // size * size, -(-end // size) * size
            if covers and first <= covers[-1][1]:
                first = covers.pop()[0]
            covers.append((first, end))
        own, before = [], 0
        for first, end in covers:
            own += [(before + begin, before + behind) for begin, behind in _within(self.ranges, first, end)]
            before += end - first
        return TensorSlice(self.dimension, tuple(covers)), TensorSlice(self.dimension, merged(own))

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor."""
        return tuple(self.size if index == self.dimension else size for index, size in enumerate(whole))


Slices = dict[str, TensorSlice]
"""By the names of tensors; the others are read whole."""


class ShardError(ValueError):
    """A model cannot be divided among so many ranks; the message names the part."""


def dealt(num_units: int, num_ranks: int) -> list[Range]:
    """Return consecutive units of each rank: as many as the others' or one more."""
    least, more = divmod(num_units, num_ranks)
    sizes = [least + (rank < more) for rank in range(num_ranks)]
    ends = [sum(sizes[: rank + 1]) for rank in range(num_ranks)]
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def dealt_by_size(sizes: Sequence[float], num_parts: int) -> list[Range]:
    """Return consecutive units of each part, at least one, so that the largest part is as small as it goes; earlier
    parts get more units where that makes no difference."""
    totals = [0.0, *accumulate(sizes)]
    # Of the first units in so many parts, by their number: the largest part, how uneven they are, and the ends.
    found: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for part in range(1, num_parts + 1):
        found = {
            end: min(
                (max(largest, totals[end] - totals[first]), uneven + (totals[end] - totals[first]) ** 2, (*ends, -end))
                for first, (largest, uneven, ends) in found.items()
                if first < end
            )
            for end in range(part, len(sizes) - num_parts + part + 1)
        }
    ends = [-end for end in found[len(sizes)][2]]
    return list(zip([0, *ends], ends, strict=False))


def scaled(units: Range, size: int, first: int = 0) -> Range:
    """Return the values of units of `size` values. `first`: index of the first unit's first value."""
    return first + units[0] * size, first + units[1] * size


def merged(ranges: Iterable[Range]) -> Ranges:
    """Return the same indices with adjacent ranges joined and empty ones left out."""
    found: list[Range] = []
    for first, end in sorted(each for each in ranges if each[0] < each[1]):
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], end)
        else:
            found.append((first, end))
    return tuple(found)


def slice_of(dimension: Literal[0, 1], ranges: Ranges, whole: int) -> TensorSlice | None:
    """Return the slice, or None if it is the whole tensor."""
    return None if ranges == ((0, whole),) else TensorSlice(dimension, ranges)


def with_rows(spec: LinearSpec, rows: Ranges) -> tuple[LinearSpec, Slices]:
    """Return a linear layer with some of the outputs. `rows`: of the required order, not of the stored one."""
    parts: list[MatrixSpec] = []
    slices: Slices = {}
    start = 0
    for part in spec.parts:
        own = _within(rows, start, start + part.rows)
        start += part.rows
        if not own:
            continue
        groups, stored = (None, own) if part.groups is None else _of_groups(part.name, part.groups, own)
        parts.append(msgspec.structs.replace(part, rows=sum(end - first for first, end in own), groups=groups))
        if (found := slice_of(0, stored, part.rows)) is not None:
            slices[f"{part.name}.weight"] = found
            if part.bias:
                slices[part.stored_bias] = found
    return LinearSpec(spec.in_features, tuple(parts)), slices


def with_columns(spec: LinearSpec, columns: Ranges, keeps_bias: bool) -> tuple[LinearSpec, Slices]:
    """Return a linear layer with some of the inputs, whose products are partial sums; one rank adds the bias."""
    parts = [msgspec.structs.replace(part, bias=part.bias and keeps_bias) for part in spec.parts]
    found = slice_of(1, columns, spec.in_features)
    slices = {} if found is None else {f"{part.name}.weight": found for part in parts}
    return LinearSpec(sum(end - first for first, end in columns), tuple(parts)), slices


def _of_groups(name: str, groups: RowGroups, rows: Ranges) -> tuple[RowGroups, Ranges]:
    """Return the order of the chosen rows, and where they are stored. `rows`: of the ungrouped order."""
    width = sum(groups.sizes)
    stored: list[Range] = []
    sizes: set[tuple[int, ...]] = set()
    num_groups = 0
    for group in range(groups.count):
        counts, before, at = [], 0, group * width
        for size in groups.sizes:
            first = before * groups.count + group * size
            own = _within(rows, first, first + size)
            stored += [(at + each[0], at + each[1]) for each in own]
            counts.append(sum(end - begin for begin, end in own))
            before, at = before + size, at + size
        if any(counts):
            num_groups += 1
            sizes.add(tuple(counts))
    if len(sizes) != 1:
        raise ShardError(f"`{name}` stores its rows in groups that cannot be divided alike.")
    return RowGroups(num_groups, sizes.pop()), merged(stored)


def _within(ranges: Ranges, first: int, end: int) -> Ranges:
    """Return the part of the ranges between two indices, counted from the first one."""
    return merged((max(each[0], first) - first, min(each[1], end) - first) for each in ranges)
