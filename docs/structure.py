"""Measures the structure of the packages: sizes, import cycles, imports against the layers.

`python docs/structure.py` prints the table of docs/architecture.md. The numbers come from the sources alone: nothing of
the project is imported. `tests/house/test_structure.py` holds the page and the limits against it.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "pagemill_crds": "crds",
    "pagemill_protocol": "libs/protocol",
    "pagemill_models": "libs/models",
    "pagemill_api": "libs/api",
    "pagemill_servers": "libs/servers",
    "pagemill_kube": "libs/kube",
    "pagemill_routing": "libs/routing",
    "pagemill_kernels": "kernels",
    "pagemill_execution": "execution",
    "pagemill_engine": "engine",
    "pagemill_gateway": "gateway",
    "pagemill_operator": "operator",
    "pagemill_simulator": "simulator",
    "pagemill": "cli",
}
"""Packages and their folders."""
LAYERS = [
    {"pagemill"},
    {"pagemill_simulator"},
    {"pagemill_engine", "pagemill_gateway", "pagemill_operator"},
    {"pagemill_execution", "pagemill_routing"},
    {"pagemill_models", "pagemill_api", "pagemill_servers", "pagemill_kube", "pagemill_crds"},
    {"pagemill_protocol", "pagemill_kernels"},
]
"""Layers from the top. A package may import from lower layers, but not from its own layer."""

Graph = dict[str, set[str]]


class Sizes(NamedTuple):
    num: int
    total: int
    median: int
    p90: int
    max: int


class Structure(NamedTuple):
    package: str
    files: Sizes
    functions: Sizes
    num_cycles: int


def modules(package: str, folder: str) -> dict[str, Path]:
    """Return the modules of one package, from dotted name to file."""
    base = ROOT / folder
    found = {}
    for path in sorted((base / package).rglob("*.py")):
        parts = list(path.relative_to(base).with_suffix("").parts)
        if "__pycache__" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def all_modules() -> dict[str, Path]:
    return {name: path for package, folder in PACKAGES.items() for name, path in modules(package, folder).items()}


class Content(NamedTuple):
    num_lines: int
    imports: list[tuple[str, str]]
    """Imported modules, and what is imported from them; empty: the module itself."""
    functions: list[int]
    """The lines of each function."""


@cache
def content(path: Path) -> Content:
    """Read a file once, however many questions are asked about it."""
    text = path.read_text()
    found = Content(len(text.splitlines()), [], [])
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.imports.extend((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.imports.extend((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Return the modules of the project that `path` imports, including imports for type checking."""
    for module, name in content(path).imports:
        full = f"{module}.{name}"
        if full in known:
            yield full
        elif module in known:
            yield module


def import_graph(known: dict[str, Path]) -> Graph:
    return {name: set(imports(path, known)) - {name} for name, path in known.items()}


def sibling_cycles(package: str, graph: Graph) -> list[list[str]]:
    """Return groups of siblings that import each other, directly or indirectly, at every level of `package`."""
    found = []
    parents = {name.rpartition(".")[0] for name in graph if name.startswith(f"{package}.")}
    for parent in sorted(parents):
        found += [group for group in _components(_siblings(parent, graph)) if len(group) > 1]
    return found


def _siblings(parent: str, graph: Graph) -> Graph:
    """Return the imports between the children of `parent`, each with everything inside it."""
    depth = parent.count(".") + 2
    between: Graph = {}
    for name, targets in graph.items():
        if not name.startswith(f"{parent}."):
            continue
        child = ".".join(name.split(".")[:depth])
        heads = {".".join(each.split(".")[:depth]) for each in targets if each.startswith(f"{parent}.")}
        between.setdefault(child, set()).update(heads - {child})
    return between


def _components(graph: Graph) -> list[list[str]]:
    """Return strongly connected components, computed by reachability because the graphs are small."""
    reach = {name: _reachable(name, graph) for name in graph}
    seen: set[str] = set()
    groups = []
    for name in sorted(graph):
        if name not in seen:
            group = [
                other for other in sorted(graph) if other == name or (other in reach[name] and name in reach[other])
            ]
            seen.update(group)
            groups.append(group)
    return groups


def _reachable(start: str, graph: Graph) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph.get(waiting.pop(), set()):
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found


def upward_imports(graph: Graph) -> list[tuple[str, str]]:
    """Return imports of a package from its own layer or from a higher one."""
    level = {package: number for number, layer in enumerate(LAYERS) for package in layer}
    found = []
    for name, targets in graph.items():
        package = name.split(".")[0]
        for target in sorted(targets):
            other = target.split(".")[0]
            if other != package and level[other] <= level[package]:
                found.append((name, target))
    return found


def structure(package: str, graph: Graph) -> Structure:
    contents = [content(path) for path in modules(package, PACKAGES[package]).values()]
    lines = [each.num_lines for each in contents]
    functions = [size for each in contents for size in each.functions]
    return Structure(package, _sizes(lines), _sizes(functions), len(sibling_cycles(package, graph)))


def _sizes(values: list[int]) -> Sizes:
    ordered = sorted(values)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return Sizes(len(ordered), sum(ordered), int(statistics.median(ordered)), p90, ordered[-1])


def table() -> str:
    """Return the table of docs/architecture.md."""
    graph = import_graph(all_modules())
    rows = [structure(package, graph) for package in PACKAGES]
    lines = [
        "| Package | Files | Lines | Lines a file, median / p90 / max | Functions | Lines a function | Cycles |",
        "|---|---|---|---|---|---|---|",
        *(_line(row) for row in rows),
        f"| all | {sum(row.files.num for row in rows)} | {sum(row.files.total for row in rows):,} | | "
        f"{sum(row.functions.num for row in rows):,} | | {sum(row.num_cycles for row in rows)} |",
        "",
        f"Imports against the layers: {len(upward_imports(graph))}.",
    ]
    return "\n".join(lines)


def _line(row: Structure) -> str:
    files, functions = row.files, row.functions
    return (
        f"| `{row.package}` | {files.num} | {files.total:,} | {files.median} / {files.p90} / {files.max} | "
        f"{functions.num:,} | {functions.median} / {functions.p90} / {functions.max} | {row.num_cycles} |"
    )


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
    graph = import_graph(all_modules())
    for package in PACKAGES:
        for group in sibling_cycles(package, graph):
            sys.stdout.write(f"cycle: {' <-> '.join(group)}\n")
