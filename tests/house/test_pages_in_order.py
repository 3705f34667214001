"""The commands of the README, the tutorial and the how-tos work in order for a newcomer (see `newcomer`).

What needs more than this machine and its packages is not pasted: its syntax is checked, and `ELSEWHERE` says who runs
it. `test_docs_commands` runs the same commands quickly, with one server and short answers.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from newcomer import ROOT, Step, can_have_networks, newcomer, steps_of


class Elsewhere(NamedTuple):
    what: str
    """A regular expression for the page, a colon, and the block."""
    needs: str
    runs: str
    """What runs such commands."""


ELSEWHERE = (
    Elsewhere(r": (?:.*\n)*(?:kubectl|helm) ", "a cluster", "e2e/helm_howto"),
    Elsewhere(r"--retry-connrefused", "the port that kubectl forwards", "e2e/helm_howto"),
    Elsewhere(r"docker build", "Docker and a registry", "e2e/helm_howto"),
    Elsewhere(r"make (up|down)-kubernetes", "root, and an hour for the first cluster", "e2e/up_kubernetes"),
    Elsewhere(r"make e2e|e2e/cluster|apt-get", "root, and an hour for the first cluster", ".ci/run"),
    Elsewhere(r"pagemill why", "a deployment that scales", "tests/cli/test_up_session.py"),
    Elsewhere(r"redis-cli", "Redis with keys of the reader", "tests/gateway/test_keys_howto.py"),
    Elsewhere(r"s3://", "a bucket", "tests/cli/test_serve_from_bucket.py"),
    Elsewhere(r"hf://", "a hub", "tests/cli/test_plan_from_headers.py"),
    Elsewhere(
        r"serve-embeddings.md: ", "an encoder, which no package brings", "tests/gateway/test_embedding_engines.py"
    ),
    Elsewhere(r"serve-adapters.md: ", "a model with adapters", "tests/cli/test_serve_adapters_howto.py"),
    Elsewhere(r"CONTROL_TOKEN_FILE", "what the start printed", "tests/gateway/test_routing_engines.py"),
    Elsewhere(r"use-(?:claude-code|codex|other-agents).md: ", "agents from registries", "tests/clients/run_clients.py"),
    Elsewhere(
        r"(?:import|from) (?:anthropic|text_generation|ollama|tritonclient|langchain_openai|instructor)",
        "a client of another project",
        "tests/clients/run_clients.py",
    ),
)
TRACE = "AzureLLMInferenceTrace_conv.csv"
"""A file that readers of a page have: requests as in Azure's traces."""
TRACE_LINES = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02}.0000000,{100 + second},{20 + second}\n" for second in range(60)
)
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
]
BLOCKS = [step for page in PAGES for step in steps_of(page)]


def elsewhere(step: Step) -> Elsewhere | None:
    return next((each for each in ELSEWHERE if re.search(each.what, f"{step.page}: {step.text}")), None)


def pasted(page: Path) -> list[Step]:
    """Return what a newcomer does on this page; where it says that `make up` serves, that comes first."""
    steps = [step for step in steps_of(page) if elsewhere(step) is None]
    if steps and "`make up` serves" in page.read_text("utf-8"):
        return [Step(steps[0].page, "bash", "make up"), *steps]
    return steps


PASTED = {page.stem: page for page in PAGES if pasted(page)}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.sample("README")
@pytest.mark.timeout(1800)  # simulations and benchmarks take minutes where others compute, too
@pytest.mark.skipif(not can_have_networks(), reason="this user cannot create networks (unshare, nsenter, ip)")
@pytest.mark.parametrize("name", PASTED)
def test_the_commands_of_a_page_work_in_order_for_a_newcomer(name: str) -> None:
    with newcomer() as someone:
        (someone.folder / TRACE).write_text(TRACE_LINES, "utf-8")
        for step in pasted(PASTED[name]):
            someone.take(step)


@pytest.mark.parametrize("step", [step for step in BLOCKS if elsewhere(step)], ids=lambda step: Path(step.page).stem)
def test_what_runs_elsewhere_is_correct_bash_or_python(step: Step) -> None:
    if step.language == "python":
        compile(step.text, step.page, "exec")
        return
    done = subprocess.run(["bash", "-n"], input=step.text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("each", ELSEWHERE, ids=lambda each: each.needs)
def test_each_reason_is_one_of_a_block_and_its_test_exists(each: Elsewhere) -> None:
    assert any(elsewhere(step) is each for step in BLOCKS)
    assert (ROOT / each.runs).exists()


def test_most_blocks_are_pasted() -> None:
    assert sum(len(pasted(page)) for page in PASTED.values()) > 40


def test_commands_in_blocks_without_a_language_are_not_overlooked() -> None:
    """A newcomer pastes them as well, so they belong into blocks of bash."""
    programs = r"(?:\.venv/bin/)?(?:pagemill|make|curl|kubectl|helm|pip|python) "
    for page in PAGES:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            assert language or not re.search(rf"^{programs}", block, re.MULTILINE), f"{page}: {block}"
