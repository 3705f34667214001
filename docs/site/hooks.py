"""What MkDocs lacks to make a site of these pages: a home page from the README, an order, and links into the sources.

The pages are written for people who read them in the repository. Links to files that are no pages lead to the
repository if `SITE_REPOSITORY_URL` names it, and are names of files otherwise; a link to a file that does not exist
fails the build. `diagrams` draws the pages' diagrams. `llms.txt` lists all pages (llmstxt.org).
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from diagrams import DiagramError, drawn
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SECTIONS = {
    "Tutorials": "tutorials",
    "How-to guides": "how-to",
    "Reference": "reference",
    "Explanation": ".",
    "Decisions": "adr",
    "Runbooks": "runbooks",
}
"""The sections of Diataxis and their folders; what lies in none explains."""
PART = re.compile(
    r"(?ms)^(?P<fence>`{3,})[^\n]*\n.*?^(?P=fence)[ ]*$"
    r"|\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)"
    r"|`[^`\n]+`"
)
"""A block of code, a link or picture, or code within a line, whichever begins first: a link's text may be code."""
ON_SITE = (".md", ".png")


def pages(folder: str) -> list[Path]:
    """Return the pages of a section, by title."""
    found = [each for each in (DOCS / folder).glob("*.md") if each.name != "README.md"]
    return sorted(found, key=lambda each: title(each).lower() if folder != "adr" else each.name)


def title(page: Path) -> str:
    heading = next(line for line in page.read_text().splitlines() if line.startswith("# "))
    return heading.removeprefix("# ").strip()


def on_config(config: Any) -> Any:
    config.nav = [{"Home": "index.md"}]
    for section, folder in SECTIONS.items():
        config.nav.append({section: [str(page.relative_to(DOCS)) for page in pages(folder)]})
    config.repo_url = os.environ.get("SITE_REPOSITORY_URL") or None
    config.site_url = os.environ.get("SITE_URL") or None
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the README as the home page."""
    text = linked((ROOT / "README.md").read_text(), ROOT, config.repo_url)
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    if page.file.src_uri == "index.md":
        return markdown
    try:
        return drawn(linked(markdown, (DOCS / page.file.src_uri).parent, config.repo_url))
    except DiagramError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from None


def linked(text: str, folder: Path, repository: str | None) -> str:
    """Return the text of a page or the README of that folder with links that lead somewhere on the site."""

    def rewritten(found: re.Match[str]) -> str:
        target = found["target"]
        if found["text"] is None or not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        path = Path(os.path.normpath(folder / target))
        if not path.exists():
            raise PluginError(f"{folder}: the link to {target} leads nowhere")
        if path.suffix in ON_SITE and path.is_relative_to(DOCS):
            start = DOCS if folder == ROOT else folder
            return f"[{found['text']}]({os.path.relpath(path, start)}{found['anchor'] or ''})"
        if path == ROOT / "README.md":
            return f"[{found['text']}]({os.path.relpath(DOCS / 'index.md', folder)})"
        name = PurePosixPath(path.relative_to(ROOT))
        if repository is None:
            return found["text"] if str(name) in found["text"] else f"{found['text']} (`{name}`)"
        return f"[{found['text']}]({repository}/{'tree' if path.is_dir() else 'blob'}/main/{name})"

    return PART.sub(rewritten, text)


def on_post_build(config: Any) -> None:
    """Write llms.txt: every page with its title, in the order of the site."""
    base = (config.site_url or "").rstrip("/")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section, folder in SECTIONS.items():
        lines += [f"## {section}", ""]
        lines += [f"- [{title(page)}]({base}/{page.relative_to(DOCS).with_suffix('')}/)" for page in pages(folder)]
        lines.append("")
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines))
