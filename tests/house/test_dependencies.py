"""Packages, wheels and images carry what they import, and nothing else: what `pyproject.toml` declares is what the
modules import, and an image builds exactly the packages that its program reaches.

The tests are static: they parse sources and `pyproject.toml`, and import nothing of the project.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import dockerfile
import pytest

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
NAMES = {re.sub(r"\W", "-", member.split("/")[-1]): member for member in MEMBERS}
FOR_OTHERS = {
    ("engine", "huggingface-hub"): "`pagemill_models` reads hf:// with it where it is installed",
    ("engine", "obstore"): "`pagemill_models` reads s3:// and gs:// with it where it is installed",
    ("engine", "httpx2"): "`pagemill_models` reads oci:// with it where it is installed",
    ("operator", "kubernetes"): "`pagemill_kube` logs in with it where it is installed",
}
"""Declared for a package below, which imports it only where it is needed."""
PARTS = {"pydantic_core": "pydantic", "triton": "torch"}
"""Modules of a distribution that comes with another."""
LATER = {"compression"}
"""Modules of later standard libraries: since Python 3.14."""


def package_of(member: str) -> Path:
    (found,) = (ROOT / member).glob("pagemill*/__init__.py")
    return found.parent


@cache
def imported(member: str) -> frozenset[str]:
    """Return the top-level modules that the package imports anywhere, other than the standard library's and its own."""
    package = package_of(member)
    found: set[str] = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.add(node.module.split(".")[0])
    return frozenset(found - {package.name, "__future__"} - sys.stdlib_module_names - LATER)


def normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@cache
def distributions() -> Mapping[str, list[str]]:
    """Return the distributions of each installed module; finding them takes a second."""
    return packages_distributions()


def distributions_of(module: str) -> set[str]:
    return {normalized(name) for name in distributions().get(module, [PARTS.get(module, module)])}


@cache
def declared(member: str, extras: bool = False) -> frozenset[str]:
    """Return the distributions that a package depends on, without versions; `extras`: also the optional ones."""
    project = tomllib.loads((ROOT / member / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    if extras:
        lines += [line for group in project.get("optional-dependencies", {}).values() for line in group]
    return frozenset(normalized(re.split(r"[\[<>=~! ;]", line)[0]) for line in lines)


def own(distributions: frozenset[str]) -> set[str]:
    """Return the members of the workspace among them."""
    names = {f"pagemill-{name}": member for name, member in NAMES.items()}
    return {names[each] for each in distributions if each in names}


def reached(member: str) -> set[str]:
    """Return the members that a package depends on, directly or not, with itself."""
    found: set[str] = set()
    waiting = [member]
    while waiting:
        if (next_one := waiting.pop()) not in found:
            found.add(next_one)
            waiting += own(declared(next_one))
    return found


@pytest.mark.parametrize("member", MEMBERS)
def test_a_package_declares_the_packages_of_this_repository_that_it_imports(member: str) -> None:
    folders = {package_of(each).name: each for each in MEMBERS}
    assert {folders[name] for name in imported(member) if name in folders} == own(declared(member))


@pytest.mark.parametrize("member", MEMBERS)
def test_a_package_imports_what_it_declares(member: str) -> None:
    used = {name for module in imported(member) for name in distributions_of(module)}
    unused = {each for each in declared(member) if each not in used and not each.startswith("pagemill")}
    assert unused == {name for folder, name in FOR_OTHERS if folder == member}


@pytest.mark.parametrize("member", MEMBERS)
def test_a_package_declares_what_it_imports(member: str) -> None:
    """Or a package that it stands on does; what it imports only where it is installed, a package above declares."""
    known = {each for below in reached(member) for each in declared(below, extras=True)}
    known |= {name for folder, name in FOR_OTHERS if member in reached(folder)} | {"torch"} & declared(
        "kernels", extras=True
    )
    own_names = {package_of(each).name for each in MEMBERS}
    others = imported(member) - own_names
    missing = {module for module in others if not (distributions_of(module) | {PARTS.get(module)}) & known}
    assert missing == set()


@pytest.mark.parametrize("component", ["engine", "gateway", "operator"])
def test_an_image_builds_exactly_the_packages_that_its_program_reaches(component: str) -> None:
    stages = dockerfile.whole(dockerfile.CODE[component])
    copied = re.findall(r"^COPY (\S+) \1$", stages, re.MULTILINE)
    built = re.findall(r"\$BUILD (\S+)", stages)
    assert sorted(copied) == sorted(built) == sorted(reached(component))


def test_the_gateway_carries_no_model_and_the_operator_no_tokenizer() -> None:
    assert "libs/models" not in reached("gateway")
    assert "libs/api" not in reached("operator")
    locked = {each["name"]: each for each in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    libraries, waiting = set(), ["pagemill-operator"]
    while waiting:
        if (name := waiting.pop()) not in libraries:
            libraries.add(name)
            waiting += [each["name"] for each in locked[name].get("dependencies", [])]
    assert libraries.isdisjoint({"jinja2", "tokenizers", "llguidance", "pagemill-api"})
