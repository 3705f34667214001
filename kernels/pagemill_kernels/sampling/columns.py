"""Records of sampling parameters: one column of 32 bits for each, declared once and carried whole.

A parameter's column is declared beside its arithmetic (`filters.DRAWS`, `penalties.PENALTIES`) and has the parameter's
name. Rows, batches, the rows on a device and the arguments of kernels contain whole records and name no column; only
the implementations of the arithmetic do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Settings = NDArray[np.void]
"""Records of `Columns.dtype`, one for each row."""


class Column(NamedTuple):
    kind: type[np.float32] | type[np.int32]
    neutral: float
    """The parameter's value without effect."""
    stored: Callable[[float], float] | None = None
    """Returns the stored number for a value of the parameter, computed once for all implementations; None: the
    value."""

    def number(self, value: float) -> float:
        return value if self.stored is None else self.stored(value)


class Columns:
    """The columns of one kind of record, in the order in which memory contains them."""

    def __init__(self, **declared: Column) -> None:
        self._declared = declared
        self.dtype = np.dtype([(name, column.kind) for name, column in declared.items()])
        self.description = "".join(f"{column.kind.__name__} {name}\n" for name, column in declared.items())
        """Types and names, which compiled code states too."""
        self._neutral = tuple(column.neutral for column in declared.values())
        self._values: Callable[[object], tuple[float, ...]] = attrgetter(*declared)
        self._record = lru_cache(maxsize=1024)(self._made)
        """Requests repeat few values."""

    def __len__(self) -> int:
        return len(self._declared)

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def index(self, name: str) -> int:
        return list(self._declared).index(name)

    def neutral(self, name: str) -> float:
        return self._declared[name].neutral

    def empty(self, num_rows: int) -> Settings:
        """Return records of zeros."""
        return np.zeros(num_rows, dtype=self.dtype)

    def record(self, params: object) -> tuple[float, ...]:
        """Return the record of an object whose attributes are the parameters."""
        return self._record(self._values(params))

    def are_neutral(self, params: object) -> bool:
        """Whether none of the object's parameters has an effect."""
        return self._values(params) == self._neutral

    def _made(self, values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(map(Column.number, self._declared.values(), values))

    def filled(self, num_rows: int, values: Mapping[str, Any]) -> Settings:
        """Return records of the parameters' values: a number for all rows, or one for each; others are neutral."""
        records = self.empty(num_rows)
        for name, column in self._declared.items():
            each = np.broadcast_to(np.asarray(values.get(name, column.neutral)), num_rows)
            records[name] = [column.number(value) for value in each.tolist()]
        return records


def words(settings: Settings) -> NDArray[np.int32]:
    """Return the bits of records as [columns, rows]."""
    return np.ascontiguousarray(settings).view(np.int32).reshape(len(settings), -1).T
