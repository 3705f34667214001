"""Words that the glossary has replaced are not used: each concept has one name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "crds",
    "libs",
    "kernels",
    "execution",
    "engine",
    "gateway",
    "operator",
    "simulator",
    "cli",
    "bench",
    "e2e",
    "tests",
)
PAGES = ("README.md", "CONTRIBUTING.md")
FOLDERS_OF_PAGES = ("docs", "charts", "examples")
"""The glossary is excluded, because it names the words."""
RETIRED = {
    "told": "reported, published or shown, by what it is",
    "tells": "reports, publishes or says",
    "untold": "unreported",
    "heard": "reported or received",
    "nobody": "no client, no request or no engine, by what it is",
    "somebody": "a client, a signal or an operator, by what it is",
    "whoever": "the caller, a client or a user, by what it is",
    "wish": "demand or target",
    "wishes": "demand or targets",
    "granule": "prefix chunk",
    "outlook": "SLO target, or predicted TTFT",
    "chronicle": "event log",
    "chores": "periodic tasks",
    "regrets": "flap count",
    "suspects": "probed requests",
    "acquitted": "cleared",
    "convicted": "blamed",
    "ruling": "routing decision",
    "desks": "ports",
    "let_go": "draining",
    "door": "HTTP server, middleware or gateway, by what it is",
    "unhurried": "low-priority",
    "gives_way": "is_low_priority",
    "rehearsal": "simulated latencies",
    "rehearsed": "simulated",
    "doors": "HTTP servers, middleware or gateways, by what they are",
}
ALLOWED = {"cannot be told from": "an error of the CRD: the message is part of the resource"}


def findings(text: str) -> list[str]:
    for phrase in ALLOWED:
        text = text.replace(phrase, "")
    words = "|".join(RETIRED)
    return re.findall(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", text, re.IGNORECASE)


def check(paths: Iterable[Path]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: `{word}`; say {RETIRED[word.lower()]}"
        for path in sorted(paths)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word in findings(line)
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_retired_word_is_used(folder: str) -> None:
    check(path for path in (ROOT / folder).rglob("*.py") if path != Path(__file__))


def test_no_retired_word_is_on_a_page_for_readers() -> None:
    folders = (path for folder in FOLDERS_OF_PAGES for path in (ROOT / folder).rglob("*"))
    pages = [path for path in folders if path.suffix in (".md", ".yaml", ".tpl", ".txt") and path.name != "glossary.md"]
    assert len(pages) > 40
    check([*pages, *(ROOT / page for page in PAGES)])


@pytest.mark.parametrize("line", ["what nobody reads", "_told = 1", "untold_tokens", "It tells why."])
def test_a_retired_word_is_detected(line: str) -> None:
    assert findings(line)


@pytest.mark.parametrize("line", ["foretold", "overheard nothing", "which cannot be told from the other"])
def test_similar_words_are_allowed(line: str) -> None:
    assert not findings(line)
