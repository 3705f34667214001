"""Threads of the native kernels: equal bits for any number of them, calls from any thread, and calls after fork()."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pagemill_kernels.arrays import Array
from pagemill_kernels.cpu import launch, library
from pagemill_kernels.linear import native
from pagemill_kernels.linear.native import NativeLinear
from pagemill_kernels.norm.native import rms_norm

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs the native kernels")


@pytest.fixture
def threads() -> Iterator[None]:
    before = launch.num_threads()
    yield
    launch.set_num_threads(before)


@pytest.fixture(scope="module")
def product() -> NativeLinear:
    weight = np.random.default_rng(0).standard_normal((1000, 256), dtype=np.float32)
    return native.pack_linear(weight, None)


def rows(count: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((count, 256), dtype=np.float32)


def cpu_threads() -> int:
    names = (path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    return sum(name == "pagemill-cpu" for name in names)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 3, 40, 700])
def test_the_number_of_threads_changes_no_bit(count: int, product: NativeLinear) -> None:
    x, weight = rows(count), np.ones(256, dtype=np.float32)
    found = []
    for number in (1, 2, 3, 8):
        launch.set_num_threads(number)
        found.append((product(x), rms_norm(x, weight, 1e-5)))
    for products, norms in found[1:]:
        np.testing.assert_array_equal(products, found[0][0])
        np.testing.assert_array_equal(norms, found[0][1])


@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_is_the_largest_requested_so_far(product: NativeLinear) -> None:
    launch.set_num_threads(4)
    product(rows(8))
    number = cpu_threads()
    assert number >= 3
    launch.set_num_threads(2)
    product(rows(8))
    assert cpu_threads() == number


@pytest.mark.usefixtures("threads")
def test_concurrent_callers_get_their_own_results(product: NativeLinear) -> None:
    launch.set_num_threads(3)
    given = [rows(20, seed) for seed in range(6)]
    expected = [product(x) for x in given]

    def repeat(x: Array) -> list[Array]:
        return [product(x) for _ in range(50)]

    with ThreadPoolExecutor(len(given)) as callers:
        for found, wanted in zip(callers.map(repeat, given), expected, strict=True):
            for each in found:
                np.testing.assert_array_equal(each, wanted)


@pytest.mark.usefixtures("threads")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_fork_has_threads_of_its_own(product: NativeLinear) -> None:
    launch.set_num_threads(3)
    x = rows(40)
    expected = product(x)
    child = os.fork()
    if child == 0:
        same = bool((product(x) == expected).all()) and cpu_threads() == 2
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(product(x), expected)


@pytest.mark.usefixtures("threads")
def test_idle_threads_use_no_cpu(product: NativeLinear) -> None:
    launch.set_num_threads(4)
    product(rows(40))
    shares: list[float] = []
    while len(shares) < 3 or (min(shares) >= 0.1 and len(shares) < 20):  # other threads of this process end
        before_s = time.process_time()
        time.sleep(0.1)
        shares.append((time.process_time() - before_s) / 0.1)
    assert min(shares) < 0.1
