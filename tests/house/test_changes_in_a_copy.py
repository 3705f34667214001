"""The changes of docs/how-to/change-pagemill.md that are made in this repository, made in a copy of it.

Each change consists of insertions into the files that the page names, and works without any other edit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "change-pagemill.md"
SAMPLING = "protocol/pagemill_protocol/sampling.py"
SCHEMAS = "protocol/pagemill_protocol/openai/schemas.py"
ROWS = "engine/pagemill_engine/sampling/rows.py"
POLICIES = "gateway/pagemill_gateway/routing/policies.py"
ROUTING = "crds/pagemill_crds/sections/routing.py"
ENGINE = "crds/pagemill_crds/sections/engine.py"
PLAN = "operator/pagemill_operator/plan/engine.py"
MOST_FILES = 5

Insertions = dict[str, list[tuple[str, str]]]
"""File -> [(text that is there once, text that follows it)]; an empty first text: the file is new."""

CHANGES: dict[str, tuple[Insertions, str]] = {
    "A sampling parameter": (
        {
            SAMPLING: [
                ('    "min_tokens": Bounds(0, INT32_MAX, is_integer=True),\n', '    "eos_bias": Bounds(-100, 100),\n'),
                (
                    "    min_tokens: int = 0\n",
                    '    eos_bias: float = 0.0\n    """Number added to the logits of ends."""\n',
                ),
            ],
            SCHEMAS: [("    min_tokens: int = 0\n", "    eos_bias: FiniteFloat = 0.0\n")],
            ROWS: [
                (
                    "            self.logit_bias[row] = params.logit_bias\n",
                    "        if params.eos_bias:\n"
                    "            ends = dict.fromkeys(admitted.eos_token_ids, params.eos_bias)\n"
                    "            self.logit_bias[row] = ends | (params.logit_bias or {})\n",
                )
            ],
        },
        """
import json
import numpy as np
from pagemill_engine.sampling.rows import SamplingRows
from pagemill_engine.sampling.sampler import sample
from pagemill_engine.scheduler.step import AdmittedSequence
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.openai.parse import parse_body
from pagemill_protocol.openai.prepare import sampling_of
from pagemill_protocol.openai.schemas import ChatCompletionRequest, CompletionRequest
from pagemill_protocol.openapi import document

def chosen(body):
    rows = SamplingRows(max_rows=1, vocab_size=8)
    sequence = AdmittedSequence("a", [1], 1, 0, [], sampling_of(body), 0, 0, eos_token_ids=[5])
    rows.admit(0, sequence)
    at = np.zeros(1, dtype=np.int64)
    return sample(np.arange(8, dtype=np.float32)[None], rows, at, at).token_ids.tolist()

chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "temperature": 0}
text = {"model": "m", "prompt": "a", "temperature": 0}
for kind, fields in ((ChatCompletionRequest, chat), (CompletionRequest, text)):
    assert chosen(parse_body(json.dumps(fields).encode(), kind)) == [7]
    assert chosen(parse_body(json.dumps(fields | {"eos_bias": 9}).encode(), kind)) == [5]
    try:
        sampling_of(parse_body(json.dumps(fields | {"eos_bias": 101}).encode(), kind))
        raise SystemExit("the value was accepted")
    except PagemillError as error:
        assert error.param == "eos_bias" and "100" in error.message, error.message
field = json.loads(document("t", "1"))["components"]["schemas"]["ChatCompletionRequest"]["properties"]["eos_bias"]
assert '"maximum": 100' in json.dumps(field), field
""",
    ),
    "A routing policy": (
        {
            "gateway/pagemill_gateway/routing/last_name.py": [
                (
                    "",
                    "from pagemill_gateway.routing.policy import RoutingDecision\n\n\n"
                    "class LastName:\n"
                    '    name = "LastName"\n\n'
                    "    def choose(self, request, candidates):\n"
                    '        return RoutingDecision(max(candidates, key=lambda each: each.endpoint_id), "its name")\n',
                )
            ],
            POLICIES: [
                ("from typing import Literal\n", "from pagemill_gateway.routing.last_name import LastName\n"),
                ('PolicyName = Literal["Cost", ', '"LastName", '),
                ('    "PrefixHash": PrefixHash,\n', '    "LastName": LastName,\n'),
            ],
            ROUTING: [('"LeastRequest", ', '"LastName", ')],
        },
        """
import msgspec
from pagemill_crds.models import LLMDeployment
from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.routing.policies import RoutingPolicies
from pagemill_gateway.routing.policy import Candidate, RequestView
from pagemill_operator.plan import make_plan

spec = {"model": {"source": "file:///m"}, "routing": {"policy": "LastName"}}
document = {"apiVersion": "pagemill.dev/v1beta1", "kind": "LLMDeployment", "metadata": {"name": "a"}, "spec": spec}
plan = make_plan(LLMDeployment.model_validate(document), "kubernetes")
assert (plan.problems, plan.ignored) == ((), ())
config = msgspec.json.decode(b'{"routing_policy": "LastName"}', type=GatewayConfig)
candidates = [Candidate(name, 0, 0, 0) for name in ("a", "c", "b")]
for policies in (RoutingPolicies("Cost", 50.0), RoutingPolicies(config.routing_policy, 50.0)):
    assert policies.named(plan.routing_policy).choose(RequestView(), candidates).chosen.endpoint_id == "c"
assert RoutingPolicies("LastName", 50.0).named("Auto").name == "LastName"
""",
    ),
    "A field of the resource": (
        {
            ENGINE: [
                (
                    "    block_size: Literal[8, 16, 32, 64, 128] = 16\n",
                    '    """Number of tokens per block."""\n'
                    "    max_num_waiting: Annotated[int, Field(ge=1)] | None = None\n",
                )
            ],
            PLAN: [
                (
                    '        "max_model_len": engine.max_model_len,\n',
                    '        "max_num_waiting": engine.max_num_waiting,\n',
                )
            ],
        },
        """
import msgspec
from pagemill_crds.explain import describe, find
from pagemill_crds.models import LLMDeployment
from pagemill_crds.generate import custom_resource_definition
from pagemill_engine.server.settings import Settings
from pagemill_operator.plan import make_plan

spec = {"model": {"source": "file:///m"}, "engine": {"maxNumWaiting": 7}}
document = {"apiVersion": "pagemill.dev/v1beta1", "kind": "LLMDeployment", "metadata": {"name": "a"}, "spec": spec}
plan = make_plan(LLMDeployment.model_validate(document), "kubernetes")
content = msgspec.json.encode(plan.groups[0].process.settings)
assert msgspec.json.decode(content, type=Settings, strict=True).engine.max_num_waiting == 7
assert "maxNumWaiting" in str(custom_resource_definition())
assert "at least: 1" in describe(find("llmd.spec.engine.maxNumWaiting"))
""",
    ),
}
"""Row of the page -> (the change, a program that uses it)."""

PACKAGES = ("protocol/pagemill_protocol", "crds/pagemill_crds", "engine/pagemill_engine")
PACKAGES += ("gateway/pagemill_gateway", "operator/pagemill_operator")


def rows() -> dict[str, list[str]]:
    """Return the cells of the page's table by the kind of change."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: row[1:] for row in cells if row[0] != "Change"}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with the packages of the repository, in the same places."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def make_change(copy: Path, change: Insertions) -> None:
    for file, insertions in change.items():
        path = copy / file
        for before, added in insertions:
            text = path.read_text() if before else ""
            assert text.count(before) == 1 or not before, f"{file}: {before!r}"
            path.write_text(text.replace(before, before + added) if before else added)


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_needs_only_the_files_that_the_page_names(kind: str, copy: Path) -> None:
    change, program = CHANGES[kind]
    number, where = rows()[kind][:2]
    assert len(change) == int(number) <= MOST_FILES
    folders = [(PAGE.parent / link).resolve() for link in re.findall(r"\]\(([^)]+)\)", where)]
    for file in change:
        known = [folder for folder in folders if (ROOT / file).is_relative_to(folder)]
        assert known or f"`{Path(file).name}`" in where, f"the page does not name {file}"
    make_change(copy, change)
    path = os.pathsep.join(str((copy / package).parent) for package in PACKAGES)
    argv = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("kind", CHANGES)
def test_the_program_fails_without_the_change(kind: str) -> None:
    argv = [sys.executable, "-c", CHANGES[kind][1]]
    assert subprocess.run(argv, capture_output=True, check=False).returncode != 0


def test_every_change_of_the_page_is_made_by_a_test() -> None:
    for kind, (number, where, seen_in) in rows().items():
        assert int(number) <= MOST_FILES, kind
        assert all((PAGE.parent / link).exists() for link in re.findall(r"\]\(([^)]+)\)", where)), kind
        (test,) = re.findall(r"`(tests/[^`]+\.py)`", seen_in)
        assert (ROOT / test).exists(), kind
        if kind in CHANGES:
            assert ROOT / test == Path(__file__).resolve(), kind
        else:
            # The change is a package of its own, which an entry point registers.
            assert int(number) == 1, kind
            assert "entry_points" in (ROOT / test).read_text() or "install" in (ROOT / test).read_text(), kind
