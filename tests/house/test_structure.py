"""The structure of the packages: no import cycles, no imports against the layers, no tiny modules, a table of sizes.

The tests are static: `docs/structure.py` reads the sources and imports none of them. Run it to see what differs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loaded_file import module_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
TOLERANCE = 0.1
"""The relative tolerance of the table, which need not change with every line."""
SMALL_LINES = 60
REGISTRIES = {
    "pagemill_engine.scheduler.order",
    "pagemill_routing.policies.registry",
    "pagemill_api.answers.registry",
    "pagemill_models.sources.registry",
    "pagemill_simulator.scaling.rivals",
    "pagemill_simulator.workloads.generators",
}
"""Modules that import the implementations of one interface. An implementation is a module of its own, however small."""
SEAMS = (
    # The file of a section of the resource is found by the section's name.
    r"pagemill_crds\.sections\.\w+",
    # The file of a family of models is found by the architecture's name.
    r"pagemill_models\.families\.\w+",
    # The folder of an operation has a file for each of its implementations, which the registry finds by a path.
    r"pagemill_kernels\.\w+\.(reference|cpu|native|triton_launch|triton_body)",
)
"""Patterns of implementations that are found by their names."""
ALONE = {
    "pagemill_engine.fetching.load": "imported after the process has set variables that its libraries read at import",
    "pagemill_execution.runners.torch_head": "its imports need torch, which its user `load_cpu` does without",
    "pagemill_execution.starting.load_encoder": "its imports need torch, which its user `load_cpu` does without",
    "pagemill_execution.settings": "only settings modules read environment variables",
    "pagemill_gateway.limits.redis.shared_poison": "redis is imported only where it is configured",
    "pagemill_kube.config": "only settings modules read environment variables",
    "pagemill_simulator.scaling.rivals": "the registry of the rivals' policies",
}
"""Other small modules with one user, each with the reason why it is not part of it."""


STRUCTURE = module_of(ROOT / "docs" / "structure.py", "docs_structure")


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    found: dict[str, set[str]] = STRUCTURE.import_graph(STRUCTURE.all_modules())
    return found


@pytest.mark.parametrize("package", sorted(STRUCTURE.PACKAGES))
def test_no_sibling_folders_or_modules_import_each_other(package: str, graph: dict[str, set[str]]) -> None:
    assert STRUCTURE.sibling_cycles(package, graph) == []


def test_no_package_imports_from_its_own_or_a_higher_layer(graph: dict[str, set[str]]) -> None:
    assert STRUCTURE.upward_imports(graph) == []


def test_a_cycle_of_three_modules_is_detected() -> None:
    planted = {"p.a": {"p.b.one"}, "p.b.one": {"p.c"}, "p.c": {"p.a"}, "p.d": {"p.a"}}
    assert STRUCTURE.sibling_cycles("p", planted) == [["p.a", "p.b", "p.c"]]


def test_an_import_from_a_higher_layer_is_detected() -> None:
    planted = {"pagemill_protocol.a": {"pagemill_engine.b"}, "pagemill_engine.b": set()}
    assert STRUCTURE.upward_imports(planted) == [("pagemill_protocol.a", "pagemill_engine.b")]


def test_a_module_under_60_lines_with_one_user_is_merged_into_it(graph: dict[str, set[str]]) -> None:
    small = {each for each in _small_with_one_user(graph) if not any(re.fullmatch(seam, each) for seam in SEAMS)}
    assert small - ALONE.keys() == set(), "merge each into its only user"
    assert ALONE.keys() - small == set(), "remove the exceptions that are no longer small or have several users"


def _small_with_one_user(graph: dict[str, set[str]]) -> set[str]:
    """Return the modules with few lines that one module imports, which is no registry."""
    users: dict[str, set[str]] = {}
    for module, imported in graph.items():
        for each in imported:
            users.setdefault(each, set()).add(module)
    return {
        module
        for module, path in STRUCTURE.all_modules().items()
        if path.name not in ("__init__.py", "__main__.py")
        and len(path.read_text().splitlines()) < SMALL_LINES
        and len(found := users.get(module, set())) == 1
        and not found & REGISTRIES
    }


def test_the_table_of_the_architecture_page_is_current() -> None:
    shown = {row[0]: row for row in _rows(PAGE.read_text())}
    for row in _rows(STRUCTURE.table()):
        assert row[0] in shown, f"{PAGE.name} lacks the row {row[0]}: run `python docs/structure.py`"
        for now, then in zip(_numbers(row), _numbers(shown[row[0]]), strict=True):
            assert abs(now - then) <= max(5, TOLERANCE * now), (
                f"{PAGE.name} shows {shown[row[0]]}, the sources have {row}: run `python docs/structure.py`"
            )


def _rows(text: str) -> list[list[str]]:
    lines = re.findall(r"^\| (?:`\w+`|all) \| \d.*\|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _numbers(row: list[str]) -> list[int]:
    return [int(number.replace(",", "")) for cell in row[1:] for number in re.findall(r"[\d,]+", cell)]
