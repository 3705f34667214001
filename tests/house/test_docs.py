"""The README and docs/: links work, commands exist, code compiles, and the reading path is short."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MAX_READING_LINES = 1000

COVERED = {
    "make up": "tests/cli runs `pagemill up` on the same example; .ci/run runs `make install`",
    "make e2e": ".ci/run",
    "apt-get install runc": ".ci/run installs the same packages",
    "python e2e/cluster": "the session of `make e2e` calls the same verbs",
    "make chat": "test_chat_command",
    "curl": "test_docs_commands",
    ".venv/bin/pagemill serve": "test_docs_commands",
    ".venv/bin/pagemill chat": "test_docs_commands",
    ".venv/bin/pagemill bench": "test_docs_commands",
    ".venv/bin/pagemill convert": "tests/cli/test_convert.py",
    ".venv/bin/pagemill up": "tests/cli",
    ".venv/bin/pagemill explain": "test_explain_commands_succeed",
    ".venv/bin/pagemill plan": "tests/cli/test_plan_command",
    ".venv/bin/pagemill simulate": "tests/cli/test_simulate_command",
    "helm": "e2e/helm_howto, e2e/limits",
    "kubectl": "e2e/helm_howto, e2e/limits, e2e/cached_model, e2e/adapters",
    "export API_KEY": "e2e/helm_howto",
    "export REGISTRY": "e2e/helm_howto sets both",
    "for each in": "e2e/helm_howto",
    "docker": "e2e/helm_howto types them; `python e2e/cluster images` builds the same files by buildah",
    "done": "e2e/helm_howto",
    "KEY=": "test_keys_howto",
    "printf": "test_keys_howto",
    ".venv/bin/pagemill gateway": "test_keys_howto",
    "redis-cli": "test_keys_howto",
    "AWS_ENDPOINT_URL=": "tests/cli/test_serve_from_bucket",
}
"""Beginnings of the commands in `bash` blocks, with the tests that run them."""


class Block(NamedTuple):
    page: Path
    language: str
    text: str


def blocks(language: str) -> Iterator[Block]:
    for page in PAGES:
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            if match[1] == language:
                yield Block(page, match[1], match[2])


def commands() -> list[str]:
    lines = "\n".join(block.text for block in blocks("bash")).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("#")]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_have_a_target(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"`[^`\n]*`(?!\])", "", text))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_every_page_is_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    queue = [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        if page in seen or page.suffix != ".md" or not page.is_file():
            continue
        seen.add(page)
        queue += [(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s:]+)\)", page.read_text())]
    assert {name(page) for page in PAGES} - {name(page) for page in seen} - {"SECURITY.md"} == set()


def test_every_picture_is_shown_on_a_page_and_the_readme_has_one_of_page_and_dashboard() -> None:
    shown = {
        (page.parent / link).resolve()
        for page in [ROOT / "README.md", *PAGES]
        for link in re.findall(r"!\[[^\]]+\]\(([^)\s]+)\)", page.read_text())
    }
    assert set((ROOT / "docs" / "pictures").iterdir()) - shown == set()
    readme = (ROOT / "README.md").read_text()
    assert "docs/pictures/fleet.png" in readme
    assert "docs/pictures/pagemill-fleet.png" in readme


def test_every_command_in_the_docs_is_run_by_a_test() -> None:
    assert commands()
    assert [line for line in commands() if not line.startswith(tuple(COVERED))] == []
    assert [start for start in COVERED if not any(line.startswith(start) for line in commands())] == []


def test_pagemill_options_in_the_docs_exist() -> None:
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text()
    sections = dict(re.findall(r"^## pagemill (\w+)\n(.*?)(?=^## |\Z)", reference, re.MULTILINE | re.DOTALL))
    for line in commands():
        words = shlex.split(line)
        if words[0].endswith("pagemill"):
            section = sections[words[1]]
            assert [word for word in words if word.startswith("-") and f"`{word}`" not in section] == [], line


def test_make_targets_in_the_docs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join(page.read_text() for page in PAGES)
    mentioned = set(re.findall(r"`make ([a-z0-9-]+)", text)) | {
        line.split()[1] for line in commands() if line.startswith("make ")
    }
    assert [target for target in mentioned if f".PHONY: {target}\n" not in makefile] == []


@pytest.mark.parametrize("line", [line for line in commands() if " explain " in line])
def test_explain_commands_succeed(line: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pagemill", *shlex.split(line)[1:]], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_python_blocks_compile() -> None:
    found = list(blocks("python"))
    assert found
    for block in found:
        ast.parse(block.text, filename=name(block.page))


def test_yaml_blocks_are_valid_resources() -> None:
    from pagemill_crds.adapters import LoRAAdapter
    from pagemill_crds.models import LLMDeployment

    found = list(blocks("yaml"))
    assert found
    for block in found:
        for document in yaml.safe_load_all(block.text):
            resource = LoRAAdapter if document["kind"] == "LoRAAdapter" else LLMDeployment
            resource.model_validate(document)


def test_curl_bodies_are_valid_requests() -> None:
    from pagemill_api.openai.parse import parse_body
    from pagemill_api.openai.schemas import ChatCompletionRequest, CompletionRequest

    schemas = {"/v1/chat/completions": ChatCompletionRequest, "/v1/completions": CompletionRequest}
    for line in commands():
        words = shlex.split(line)
        if words[0] == "curl" and "-d" in words:
            path = re.sub(r"^http://[^/]+", "", next(word for word in words if word.startswith("http")))
            body = words[words.index("-d") + 1]
            assert json.loads(body)
            parse_body(body.encode(), schemas[path])


def test_the_reading_path_is_short() -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Read this first")[1]
    links = re.findall(r"^\d+\. \[[^\]]+\]\(\.\./([^)]+)\)", section, re.MULTILINE)
    assert len(links) >= 5
    lines = {link: len((ROOT / link).read_text().splitlines()) for link in links}
    assert sum(lines.values()) < MAX_READING_LINES, lines


def test_the_life_of_a_request_has_eight_steps() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## The life of a request")[1].split("\n## ")[0]
    assert re.findall(r"^(\d)\. \*\*", section, re.MULTILINE) == list("12345678")


def test_the_architecture_page_names_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"^\| `([a-z0-9]+)/`", text, re.MULTILINE))
    folders = {path.parent.name for path in ROOT.glob("*/pyproject.toml")} | {"libs", "bench", "e2e", "tests"}
    assert folders <= named
    assert [
        path.parent.name for path in ROOT.glob("libs/*/pyproject.toml") if f"`pagemill_{path.parent.name}`" not in text
    ] == []


def test_decisions_are_numbered_and_listed() -> None:
    folder = ROOT / "docs" / "adr"
    records = sorted(path.name for path in folder.glob("*.md"))
    assert [int(record[:4]) for record in records] == list(range(1, len(records) + 1))
    index = (folder / "0001-record-decisions.md").read_text()
    assert [record for record in records[1:] if f"({record})" not in index] == []
    for record in records[1:]:
        text = (folder / record).read_text()
        assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Consequences")), record


@pytest.mark.parametrize("example", sorted((ROOT / "examples").rglob("*.yaml")), ids=name)
def test_examples_are_valid_and_can_be_planned(example: Path) -> None:
    from pagemill_crds.adapters import LoRAAdapter
    from pagemill_crds.models import LLMDeployment
    from pagemill_operator.plan.planner import make_plan

    found = list(yaml.safe_load_all(example.read_text()))
    if example.parent.name == "external-scaling":
        # test_external_scaling checks the other objects.
        found = [each for each in found if each.get("kind") == "LLMDeployment"]
    for document in found:
        if document["kind"] == "LoRAAdapter":
            assert LoRAAdapter.model_validate(document).name
            continue
        assert make_plan(LLMDeployment.model_validate(document)).key


INSTALLED_BY = {
    "openai": "openai",
    "anthropic": "anthropic",
    "instructor": "instructor",
    "langchain_openai": "langchain-openai",
    "ollama": "ollama",
    "text_generation": "text-generation",
    "tritonclient": "tritonclient[http]",
}
"""What a reader installs for the modules that examples import; other modules come with Pagemill or with these."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_install_what_they_import_and_name_the_model_that_make_up_serves(page: Path) -> None:
    text = page.read_text("utf-8")
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        modules = {each.partition(".")[0] for each in re.findall(r"^(?:from|import) ([\w.]+)", block, re.MULTILINE)}
        for module in modules & INSTALLED_BY.keys():
            assert re.search(rf"pip install '?{re.escape(INSTALLED_BY[module])}", text), f"{module} is not installed"
        if "127.0.0.1:8080" in block:
            assert set(re.findall(r'model="([^"]+)"', block)) <= {"smollm2"}
