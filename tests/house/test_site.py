"""The docs' site: diagrams without scripts, and a build that fails at a dead link.

The builds need MkDocs, which `make site` installs apart from the project; without it they are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest
from waiting import WAIT_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = ROOT / ".uv" / "site" / "bin" / "mkdocs"
PAGE = "how-to/serve-one-model.md"
DIAGRAM = """sequenceDiagram
%% a comment
participant A as One & only
participant B as Another
A->>B: ask
B->>B: think
Note over A,B: a note
B-->>A: answer
"""

needs_mkdocs = pytest.mark.skipif(not MKDOCS.exists(), reason="`make site` installs MkDocs")


@pytest.fixture
def diagrams() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_diagrams", ROOT / "docs" / "site" / "diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def test_a_diagram_becomes_svg_with_every_text(diagrams: ModuleType) -> None:
    page = f"before\n\n```mermaid\n{DIAGRAM}```\n\n```mermaid\nflowchart LR\n```\n"
    text = diagrams.drawn(page)
    assert "```mermaid\nflowchart LR" in text, "other kinds stay text"
    image = re.search(r"<svg.*</svg>", text, re.DOTALL)
    assert image is not None
    assert "\n\n" not in image[0], "a blank line would end the block"
    drawing = ET.fromstring(image[0])
    texts = [each.text for each in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["One & only", "Another", "ask", "think", "a note", "answer"]
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}path"))) == 1 + 3


@pytest.mark.parametrize(
    ("line", "named"),
    [("alt other", "cannot draw `alt other`"), ("A->>C: ask", "`C` is no participant"), ("A-xB: ask", "cannot draw")],
)
def test_a_line_that_cannot_be_drawn_is_named(diagrams: ModuleType, line: str, named: str) -> None:
    with pytest.raises(diagrams.DiagramError, match=re.escape(named)):
        diagrams.read(f"{DIAGRAM}{line}\n")


def test_every_sequence_diagram_of_the_pages_can_be_drawn(diagrams: ModuleType) -> None:
    drawn = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "<svg" in diagrams.drawn(page.read_text())]
    assert {page.stem for page in drawn} >= {"architecture", "scale-with-the-load"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of what the site is built from; links from the docs into the sources lead there, too."""
    for name in os.listdir(ROOT):
        if name not in {"docs", "dist", "mkdocs.yml", "README.md"} and not name.startswith("."):
            (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def build(checkout: Path) -> subprocess.CompletedProcess[str]:
    argv = [str(MKDOCS), "build"]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(argv, cwd=checkout, env=env, capture_output=True, text=True, timeout=4 * WAIT_LIMIT_S)


@needs_mkdocs
def test_the_site_holds_every_page_and_nothing_from_outside(checkout: Path) -> None:
    done = build(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    site = checkout / "dist" / "site"
    assert '<svg class="sequence"' in (site / "architecture" / "index.html").read_text()
    for page in site.rglob("*.html"):
        assets = re.findall(
            r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?(https?://[^\" >]+)", page.read_text()
        )
        assert assets == [], page
    paths = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "README.md"]
    pages = [str(path.relative_to(ROOT / "docs").with_suffix("")) for path in paths]
    assert len(pages) > 100
    listed = (site / "llms.txt").read_text()
    assert [page for page in pages if page not in listed] == []
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0].rstrip("/") for entry in index["docs"]}
    assert [page for page in pages if page not in found] == []
    for picture in (ROOT / "docs" / "pictures").iterdir():
        assert (site / "pictures" / picture.name).exists()


@needs_mkdocs
@pytest.mark.parametrize("target", ["no-such-page.md", "../../engine/no_such_file.py"])
@pytest.mark.parametrize("text", ["gone", "`gone`"])
def test_a_link_to_a_missing_file_fails_the_build(checkout: Path, target: str, text: str) -> None:
    """Also where the link's text is code."""
    output = failing(checkout, f"[{text}]({target})")
    assert f"the link to {target} leads nowhere" in output


@needs_mkdocs
def test_links_to_missing_headings_fail_the_build(checkout: Path) -> None:
    output = failing(checkout, "[gone](serve-adapters.md#no-such-heading) and [gone](#nor-this-one)")
    assert "does not contain an anchor '#no-such-heading'" in output
    assert "#nor-this-one" in output


def failing(checkout: Path, planted: str) -> str:
    """Return the output of a build, which must fail, with this text at the end of a page."""
    page = checkout / "docs" / PAGE
    page.write_text(f"{page.read_text()}\n{planted}\n")
    done = build(checkout)
    assert done.returncode != 0
    return done.stdout + done.stderr


@needs_mkdocs
def test_a_diagram_that_cannot_be_drawn_fails_the_build(checkout: Path) -> None:
    assert "`A` is no participant" in failing(checkout, "```mermaid\nsequenceDiagram\nA->>B: ask\n```")
