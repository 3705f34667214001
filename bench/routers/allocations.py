"""Counts Python's memory allocations with wrappers around its allocators, which are compiled from C.

Objects that come from a free list are not counted. `AllocationCounter` counts only between `start` and `stop`, to
exclude the allocations of a benchmark itself.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

SOURCE = """
#include <stddef.h>

struct allocator {
  void *context;
  void *(*malloc)(void *, size_t);
  void *(*calloc)(void *, size_t, size_t);
  void *(*realloc)(void *, void *, size_t);
  void (*free)(void *, void *);
};

int is_counting = 0;
unsigned long long num_allocations = 0;
struct allocator wrapped[2];

static void *count_malloc(void *context, size_t size) {
  struct allocator *inner = context;
  num_allocations += is_counting;
  return inner->malloc(inner->context, size);
}
static void *count_calloc(void *context, size_t count, size_t size) {
  struct allocator *inner = context;
  num_allocations += is_counting;
  return inner->calloc(inner->context, count, size);
}
static void *count_realloc(void *context, void *block, size_t size) {
  struct allocator *inner = context;
  num_allocations += is_counting;
  return inner->realloc(inner->context, block, size);
}
static void count_free(void *context, void *block) {
  struct allocator *inner = context;
  inner->free(inner->context, block);
}
void counting(int domain, struct allocator *made) {
  struct allocator outer = {&wrapped[domain], count_malloc, count_calloc, count_realloc, count_free};
  *made = outer;
}
"""
MEMORY, OBJECTS = 1, 2
"""The allocators of buffers and of objects; both run with the interpreter's lock held."""


class _Allocator(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("context", "malloc", "calloc", "realloc", "free")]


def compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


class AllocationCounter:
    """Counts allocations. Create it once per process, because the allocators stay wrapped."""

    def __init__(self, folder: Path) -> None:
        """Compile the wrappers into `folder`. Raises `RuntimeError` without a C compiler."""
        found = compiler()
        if found is None:
            raise RuntimeError("counting allocations needs a C compiler: install gcc or clang")
        folder.mkdir(parents=True, exist_ok=True)
        source, library = folder / "allocations.c", folder / "allocations.so"
        source.write_text(SOURCE)
        subprocess.run([found, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        self._library = ctypes.CDLL(str(library))
        self._is_counting = ctypes.c_int.in_dll(self._library, "is_counting")
        self._num = ctypes.c_ulonglong.in_dll(self._library, "num_allocations")
        wrapped = (_Allocator * 2).in_dll(self._library, "wrapped")
        for number, domain in enumerate((MEMORY, OBJECTS)):
            made = _Allocator()
            ctypes.pythonapi.PyMem_GetAllocator(domain, ctypes.byref(wrapped[number]))
            self._library.counting(number, ctypes.byref(made))
            ctypes.pythonapi.PyMem_SetAllocator(domain, ctypes.byref(made))

    @property
    def num(self) -> int:
        return self._num.value

    def start(self) -> None:
        self._is_counting.value = 1

    def stop(self) -> None:
        self._is_counting.value = 0
