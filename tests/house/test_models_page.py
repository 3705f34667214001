"""The page of models says of each family what computes it on CPUs, and what it was compared with."""

from __future__ import annotations

from typing import Any

import pytest
from declared_families import KINDS, NAMES, architecture_of, declared

from pagemill_execution.decoders.native.layers import can_fuse
from pagemill_models.declaration.known import BUILT_IN

NAMES_OF = {
    module: [each for each in NAMES if architecture_of(each) in names.architectures]
    for module, names in BUILT_IN.items()
}


def test_all_families_are_declared_by_tests() -> None:
    assert [module for module, names in NAMES_OF.items() if not names] == []


@pytest.mark.parametrize("module", BUILT_IN)
def test_families_need_no_torch_on_cpus_as_the_page_says(module: str) -> None:
    assert all(can_fuse(declared(name)) for name in NAMES_OF[module])


@pytest.mark.parametrize("module", BUILT_IN)
def test_the_page_names_the_families_that_are_compared_with_formulas(generate: Any, module: str) -> None:
    assert (module in generate.WITHOUT_TRANSFORMERS) == any(name in KINDS for name in NAMES_OF[module])
