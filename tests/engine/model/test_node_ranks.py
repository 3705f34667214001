"""Processes of several nodes that compute a model together over TCP give the tokens of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_engine import Nodes, node_loader
from ranked_engine import SETTINGS, answers, saved

from pagemill_kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with node_loader(tmp_path) as load:
        yield load


@pytest.mark.parametrize(("size", "num_stages", "count"), [(2, 1, 2), (2, 2, 2), (4, 2, 2)])
def test_nodes_give_the_tokens_of_one_process(
    llama_folder: Path, nodes: Nodes, runner_loader: Any, size: int, num_stages: int, count: int
) -> None:
    single = runner_loader(llama_folder, **SETTINGS)
    expected = answers(single)
    single.close()
    assert answers(nodes(llama_folder, size, num_stages, count=count)) == expected
