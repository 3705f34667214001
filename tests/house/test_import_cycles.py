"""No two folders or modules beside each other import each other, directly or around a circle, in any package.

Static, as the house rules: imports are read from the sources, those under `TYPE_CHECKING` and inside functions too. A
folder stands for all modules in it. `REMAINING` names the circles that are still to be opened: it only ever gets
shorter.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("*/pagemill*/__init__.py"))
Module = tuple[str, ...]
REMAINING: dict[str, list[set[str]]] = {
    "pagemill_engine": [{"beams", "request"}],
    "pagemill_gateway": [
        {"brain", "config", "discovery", "limits", "metrics", "relay"},
        {"processes", "server"},
    ],
    "pagemill_protocol": [
        {"choosing", "sampling"},
        {"model_spec", "spec_from_config", "spec_from_gguf"},
        {"bundle", "gguf_tokenizer", "hf_folder"},
    ],
}
"""Package -> siblings that import each other in a circle."""


@cache
def modules(package: Path) -> dict[Module, Path]:
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[parts[:-1] if parts[-1] == "__init__" else parts] = path
    return found


def imports(path: Path, known: dict[Module, Path]) -> Iterator[Module]:
    """Modules of the same package."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            base = tuple(node.module.split("."))
            for alias in node.names:
                target = (*base, alias.name)
                yield target if target in known else base
        elif isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)


def sibling_imports(package: Path) -> dict[Module, dict[str, set[str]]]:
    """Folder -> child -> children beside it that it imports from."""
    known = modules(package)
    found: dict[Module, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, path in known.items():
        for target in imports(path, known):
            common = next((n for n, (a, b) in enumerate(zip(module, target, strict=False)) if a != b), None)
            if common:
                found[module[:common]][module[common]].add(target[common])
    return found


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of nodes that all reach each other."""
    reached = {node: _reach(node, edges) for node in edges}
    rings = [{other for other in reached[node] if node in reached.get(other, set())} for node in edges]
    return [ring for number, ring in enumerate(rings) if ring and ring not in rings[:number]]


def _reach(start: str, edges: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for node in edges.get(waiting.pop(), set()) - reached:
            reached.add(node)
            waiting.append(node)
    return reached


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e"}}
    assert circles(edges) == [{"a", "b", "c"}, {"e", "f"}]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_every_package_is_looked_at() -> None:
    assert len(PACKAGES) == 8
    assert all(len(sibling_imports(package)) for package in PACKAGES)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_siblings_do_not_import_each_other_in_circles(package: Path) -> None:
    remaining = REMAINING.get(package.name, [])
    new = {
        ".".join(folder): ring
        for folder, edges in sibling_imports(package).items()
        for ring in circles(edges)
        if not any(ring <= known for known in remaining)
    }
    assert new == {}
