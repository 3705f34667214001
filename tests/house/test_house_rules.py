"""Rules of the project that no linter has: sizes, layout, reading of settings, and forbidden imports.

The tests are fast and static: they parse the sources and import none of them. `make lint` runs them.
"""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBS = ["libs/protocol", "libs/models", "libs/api", "libs/servers", "libs/kube", "libs/routing"]
SOURCE_ROOTS = ["crds", *LIBS, "kernels", "execution", "engine", "gateway", "operator", "simulator", "cli"]
OTHER_ROOTS = ["bench", "docs", "e2e", "examples", "charts", "release", "tests"]
SKIPPED_FOLDERS = {"__pycache__", "build", "dist", "node_modules"}
MAX_LINES = 600
MAX_MODULES = 16
ENVIRONMENT_READERS = {"config.py", "settings.py"}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "print"}


def files(roots: list[str], suffix: str = ".py") -> Iterator[Path]:
    for root in roots:
        for path in sorted((ROOT / root).rglob(f"*{suffix}")):
            parts = path.relative_to(ROOT).parts
            if not SKIPPED_FOLDERS.intersection(parts) and not any(part.startswith(".") for part in parts):
                yield path


def product_files() -> Iterator[Path]:
    """Yield the modules of the packages, without the build scripts next to them."""
    return (path for path in files(SOURCE_ROOTS) if path.parent.parent != ROOT)


@cache
def tree(path: Path) -> ast.Module:
    """Return the parsed module, which the garbage collector never scans: scanning all takes three times the parsing."""
    gc.disable()
    try:
        return ast.parse(path.read_text(), filename=str(path))
    finally:
        gc.freeze()
        gc.enable()


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of the module; most rules look at them, and walking takes longer than looking."""
    return list(ast.walk(tree(path)))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_sources_to_check() -> None:
    assert len(list(product_files())) > 50


def test_no_file_is_longer_than_600_lines() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in files(SOURCE_ROOTS + OTHER_ROOTS)}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_source_roots_and_tests_are_not_packages() -> None:
    """`operator/__init__.py` would shadow the standard library; one under tests/ would break importlib mode."""
    roots = [ROOT / root / "__init__.py" for root in [*SOURCE_ROOTS, *OTHER_ROOTS, "libs"]]
    found = [path for path in roots if path.exists()]
    found += [path for folder in ("tests", "e2e") for path in (ROOT / folder).rglob("__init__.py")]
    assert [name(path) for path in found] == []


def test_every_folder_of_a_package_has_an_init() -> None:
    """Without one, a folder is a namespace: import contracts and type checks do not see what it contains."""
    folders = {path.parent for path in product_files()}
    parents = {above for folder in folders for above in folder.parents if _is_in_a_package(above)}
    assert [name(folder) for folder in sorted(folders | parents) if not (folder / "__init__.py").exists()] == []


def _is_in_a_package(folder: Path) -> bool:
    return folder.is_relative_to(ROOT) and any(part.startswith("pagemill") for part in folder.relative_to(ROOT).parts)


def test_no_folder_of_a_package_has_more_than_16_modules() -> None:
    """The exception is the registry of model families, which consists of one file each."""
    sizes = Counter(path.parent for path in product_files() if path.name != "__init__.py")
    large = {name(folder): num for folder, num in sizes.items() if num > MAX_MODULES}
    assert large.keys() == {"libs/models/pagemill_models/families"}


def test_test_files_have_unique_names() -> None:
    counts = Counter(path.name for path in files(["tests", "e2e"]) if path.name.startswith("test_"))
    assert {file: count for file, count in counts.items() if count > 1} == {}


@pytest.mark.slow
def test_every_module_has_a_docstring() -> None:
    silent = [
        name(path)
        for path in files(SOURCE_ROOTS + OTHER_ROOTS)
        if tree(path).body and ast.get_docstring(tree(path)) is None
    ]
    assert silent == []


def test_only_settings_modules_read_the_environment() -> None:
    readers = [
        f"{name(path)}:{node.lineno}"
        for path in product_files()
        if path.name not in ENVIRONMENT_READERS
        for node in nodes(path)
        if _reads_environment(node)
    ]
    assert readers == []


def _reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
        return node.attr in {"environ", "environb", "getenv", "getenvb"}
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(alias.name in {"environ", "getenv"} for alias in node.names)
    return False


def test_no_module_unpickles() -> None:
    found = [
        f"{name(path)}:{node.lineno} imports {imported}"
        for path in product_files()
        for node in nodes(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for imported in _imported(node)
        if imported.split(".")[0] in FORBIDDEN_IMPORTS
    ]
    loads = [f"{name(path)}:{node.lineno}" for path in product_files() for node in nodes(path) if _loads(node)]
    assert found + loads == []


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]


def _loads(node: ast.AST) -> bool:
    """Whether the attribute unpickles: `torch.load`, or connections of multiprocessing."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return False
    return (node.value.id, node.attr) in {("torch", "load"), ("multiprocessing", "Queue"), ("multiprocessing", "Pipe")}


def test_the_longest_test_files_start_first_and_are_listed_in_contributing() -> None:
    longest, of_few_tests = (
        ast.literal_eval(node.value)
        for node in tree(ROOT / "tests" / "conftest.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("LONGEST", "LONG_OF_FEW_TESTS")
    )
    assert [file for file in (*longest, *of_few_tests) if not (ROOT / "tests" / file).exists()] == []
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [file for file in longest[:10] if f"`{file}`" not in page] == []


@pytest.mark.slow
def test_suspended_processes_are_killed_after_their_test() -> None:
    """Only `hang` may send SIGSTOP; `tests/conftest.py` cleans up after it."""
    found = [
        f"{name(path)}:{node.lineno}"
        for path in files(["tests"])
        if path.name != "hung_processes.py"
        for node in nodes(path)
        if isinstance(node, ast.Call) and any(_stops(each) for each in (node.func, *node.args))
    ]
    assert found == []


def _stops(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in {"suspend", "SIGSTOP"}


def test_libraries_neither_evaluate_text_nor_print() -> None:
    found = [
        f"{name(path)}:{node.lineno} calls {node.func.id}"
        for path in product_files()
        if path.parts[len(ROOT.parts)] != "cli"
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS
    ]
    assert found == []


def test_there_is_no_unfinished_work() -> None:
    marker = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [
        f"{name(path)}:{number}"
        for path in product_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marker.search(line)
    ]
    assert found == []


def test_every_module_postpones_the_evaluation_of_annotations() -> None:
    """Every module with annotations has `from __future__ import annotations`."""
    missing = [
        name(path)
        for path in files(SOURCE_ROOTS + OTHER_ROOTS)
        if any(isinstance(node, ast.FunctionDef | ast.AnnAssign | ast.AsyncFunctionDef) for node in tree(path).body)
        and not _imports_future_annotations(path)
    ]
    assert missing == []


def _imports_future_annotations(path: Path) -> bool:
    return any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" and node.names[0].name == "annotations"
        for node in tree(path).body
    )


def test_every_package_is_marked_as_typed() -> None:
    packages = [path.parent for root in SOURCE_ROOTS for path in (ROOT / root).glob("pagemill*/__init__.py")]
    assert {name(package.parent) for package in packages} == set(SOURCE_ROOTS)
    assert [name(package) for package in packages if not (package / "py.typed").exists()] == []


def test_a_public_class_name_means_one_thing() -> None:
    """Names of private classes may repeat, because no other module uses them."""
    places: dict[str, list[str]] = {}
    for path in product_files():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{name(path)}:{node.lineno}")
    assert {each: where for each, where in places.items() if len(where) > 1} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    """Counted with signature and docstring.

    Triton kernels are excepted: their pointers, strides and compile-time constants are parameters, and a division into
    functions can change the compiled code.
    """
    functions = [
        (path, node)
        for path in product_files()
        if path.name != "triton_body.py"
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {
        f"{name(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1 for path, node in functions
    }
    assert {function: lines for function, lines in lengths.items() if lines > 60} == {}
    assert max(lengths.values()) > 30
