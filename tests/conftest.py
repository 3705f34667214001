"""Without an NVIDIA device Triton's kernels run in its interpreter: chosen before anything imports Triton.

Property tests draw a sample of their examples unless `--hypothesis-profile=full` asks for all; tests with a marker
`sample` run with some of their parameters, and with the others in `make test-full`.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("sample", settings(), max_examples=30, deadline=None)
settings.register_profile("full", settings(), max_examples=100, deadline=None)
settings.register_profile("thorough", settings(), max_examples=5000, deadline=None)
settings.load_profile("sample")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected lives until the end: the garbage collector need not look at it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unused: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    used: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for item in items:
        marker, call = item.get_closest_marker("sample"), getattr(item, "callspec", None)
        if marker is None or call is None:
            continue
        test = item.nodeid.partition("[")[0]
        matching = {pattern for pattern in marker.args if fnmatchcase(call.id, pattern)}
        if not matching:
            item.add_marker(pytest.mark.full)
        for pattern in marker.args:
            (used if pattern in matching else unused)[test, pattern].add(call.id)
    # A part of a file's tests may have been asked for by their ids: only a whole parameter set shows a wrong pattern.
    wrong = [f"{test}: {pattern}" for test, pattern in unused.keys() - used.keys() if len(unused[test, pattern]) > 1]
    if wrong:
        raise pytest.UsageError(f"patterns of `sample` that match no parameters: {', '.join(sorted(wrong))}")
