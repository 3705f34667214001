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
SAMPLING = "libs/protocol/pagemill_protocol/request/sampling.py"
SCHEMAS = "libs/api/pagemill_api/openai/schemas.py"
FILTERS = "kernels/pagemill_kernels/sampling/filters.py"
NATIVE = "kernels/pagemill_kernels/cpu/src/sampling.cpp"
TRITON = "kernels/pagemill_kernels/sampling/triton_body.py"
ROWS = "execution/pagemill_execution/sampling/rows.py"
POLICIES = "libs/routing/pagemill_routing/policies/registry.py"
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
from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.sampling.sampler import sample
from pagemill_execution.step import AdmittedSequence
from pagemill_protocol.errors import PagemillError
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.prepare import sampling_of
from pagemill_api.openai.schemas import ChatCompletionRequest, CompletionRequest
from pagemill_api.openapi import document

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
    "A sampling parameter with arithmetic": (
        {
            SAMPLING: [
                (
                    '    "min_p": Bounds(0, 1, neutral=(0.0,)),\n',
                    '    "epsilon_cutoff": Bounds(0, 1, neutral=(0.0,)),\n',
                ),
                ("    min_p: float = 0.0\n", "    epsilon_cutoff: float = 0.0\n"),
            ],
            SCHEMAS: [("    min_p: FiniteFloat = 0.0\n", "    epsilon_cutoff: FiniteFloat = 0.0\n")],
            FILTERS: [
                (
                    "    min_p=Column(np.float32, 0.0, log_share),\n",
                    "    epsilon_cutoff=Column(np.float32, 0.0, log_share),\n",
                ),
                (
                    '    drop_below(x, settings["min_p"])\n',
                    '    for row, share in zip(x, settings["epsilon_cutoff"], strict=True):\n'
                    "        whole = arithmetic.total_mass(row) * np.ones(1, np.float32)\n"
                    "        whole = whole.astype(np.float32) * np.float32(2.0**-40)\n"
                    "        drop_below(row[None], np.minimum(share + arithmetic.log(whole), np.float32(0)))\n",
                ),
            ],
            NATIVE: [
                ("column(float32, min_p)", " column(float32, epsilon_cutoff)"),
                (
                    "  Scaled scaled{row, a.vocab_size, best.value, settings.temperature, settings.min_p};\n",
                    "  if (settings.epsilon_cutoff > -kInfinity) {\n"
                    "    const float whole = static_cast<float>(total_mass(scaled)) * 0x1p-40f;\n"
                    "    const float lowest = std::min(settings.epsilon_cutoff + logarithm(whole), 0.0f);\n"
                    "    scaled.least = std::max(scaled.least, lowest);\n"
                    "  }\n",
                ),
            ],
            TRITON: [
                (
                    'MIN_P: tl.constexpr = tl.constexpr(DRAWS.index("min_p"))\n',
                    'EPSILON: tl.constexpr = tl.constexpr(DRAWS.index("epsilon_cutoff"))\n',
                ),
                (
                    "    floor = tl.load(own + MIN_P * num_rows).to(tl.float32, bitcast=True)\n",
                    "    epsilon = tl.load(own + EPSILON * num_rows).to(tl.float32, bitcast=True)\n",
                ),
                (
                    "        cut = tl.full((), LAST_KEY, tl.int32)\n",
                    '        if epsilon > float("-inf"):\n'
                    "            whole = mass_up_to(\n"
                    "                cut, logits_ptr, listed_ptr, -1, maximum, temperature, floor,\n"
                    "                VOCAB, CUT_BLOCK, CAPACITY,\n"
                    "            )\n"
                    "            lowest = epsilon + natural_log(whole.to(tl.float32) * 2.0**-40)\n"
                    "            floor = tl.maximum(floor, tl.minimum(lowest, 0.0))\n",
                ),
            ],
        },
        """
import json
from pagemill_protocol.errors import PagemillError
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.prepare import sampling_of
from pagemill_api.openai.schemas import CompletionRequest

def asked(**fields):
    body = {"model": "m", "prompt": "a", **fields}
    return sampling_of(parse_body(json.dumps(body).encode(), CompletionRequest))

try:
    asked(epsilon_cutoff=1.5)
    raise SystemExit("the value was accepted")
except PagemillError as error:
    assert error.param == "epsilon_cutoff", error.message

import ctypes
import os
import numpy as np
from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.step import AdmittedSequence, HeldBlocks, StepPlan
from pagemill_kernels.cpu import library
from pagemill_kernels.sampling import native, reference
from pagemill_kernels.sampling.batch import SamplingBatch

kinds = [{"epsilon_cutoff": 0.05}, {"epsilon_cutoff": 0.05, "top_p": 0.8}, {"epsilon_cutoff": 1, "min_p": 0.01}, {}]
sequences = [AdmittedSequence(str(i), [1], 1, 0, [HeldBlocks(0, [0])], asked(**kinds[i % 4]), 0, i) for i in range(20)]
at, none = np.arange(20), np.zeros(20, dtype=np.int64)
logits = np.broadcast_to(np.random.default_rng(0).normal(0, 1.5, 50).astype(np.float32), (20, 50)).copy()
shares = np.exp(logits[0]) / np.exp(logits[0]).sum()
rows = SamplingRows(max_rows=20, vocab_size=50)
for row, sequence in enumerate(sequences):
    rows.admit(row, sequence)
batch = rows.batch(at, none)
tokens = reference.sample_tokens(logits.copy(), batch).token_ids
assert set(tokens[2::4]) == {shares.argmax()}
assert shares[tokens[0::4]].min() > 0.05 > shares[tokens[3::4]].min()

compiled = ctypes.CDLL(os.environ["COMPILED"])
compiled.pagemill_sample.argtypes = library._SIGNATURES["pagemill_sample"]
compiled.pagemill_sampling_columns.restype = ctypes.c_char_p
library.load = lambda: compiled
assert native.is_current()
assert native.sample_tokens(logits, batch).token_ids.tolist() == tokens.tolist()

import torch
from quick_interpreter import speed_up_interpreter
from pagemill_execution.runners.device.device_rows import DeviceRows
from pagemill_kernels.request_rows import triton_launch as device
from pagemill_kernels.request_rows.layout import DeviceStepInputs, RowLayout, RowState
from pagemill_kernels.request_rows.staging import Staging
from pagemill_kernels.sampling import triton_launch

speed_up_interpreter()
layout, cpu, staging = RowLayout.of(20, 16, 16), torch.device("cpu"), Staging()
state, on_device = RowState(layout, [0], cpu), DeviceRows(layout)
plan = StepPlan(0, dict.fromkeys(map(str, range(20)), 1), admitted=sequences, samples=set(map(str, range(20))))
on_device.apply(plan, rows, staging)
step = on_device.step(plan)
writes, placed = staging.upload(step.rows, step.query_start_loc, step.sample_start_loc, cpu)
device.write_rows(state, writes)
inputs = DeviceStepInputs.empty(20, 20, 20, layout, cpu)
device.build_inputs(state, placed, 1, 20, 16, inputs)
found = triton_launch.draw_tokens(torch.from_numpy(logits), SamplingBatch(), inputs.settings)
assert found.tokens.tolist() == tokens.tolist()
""",
    ),
    "A routing policy": (
        {
            "libs/routing/pagemill_routing/policies/last_name.py": [
                (
                    "",
                    "from pagemill_routing.policies.policy import RoutingDecision, RoutingPolicy\n\n\n"
                    "class LastName(RoutingPolicy):\n"
                    '    name = "LastName"\n\n'
                    "    def choose(self, request, candidates):\n"
                    '        return RoutingDecision(max(candidates, key=lambda each: each.endpoint_id), "its name")\n',
                )
            ],
            POLICIES: [
                (
                    "from importlib.metadata import EntryPoint, entry_points\n",
                    "from pagemill_routing.policies.last_name import LastName\n",
                ),
                ("    PrefixHash,\n", "    LastName,\n"),
            ],
        },
        """
import msgspec
from pagemill_crds.models import LLMDeployment
from pagemill_gateway.config import GatewayConfig
from pagemill_routing.policies.registry import RoutingPolicies
from pagemill_routing.policies.policy import Candidate, RequestView
from pagemill_operator.plan import make_plan

spec = {"model": {"source": "file:///m"}, "routing": {"policy": "LastName"}}
document = {"apiVersion": "pagemill.dev/v1beta1", "kind": "LLMDeployment", "metadata": {"name": "a"}, "spec": spec}
plan = make_plan(LLMDeployment.model_validate(document), "kubernetes")
assert (plan.problems, plan.ignored) == ((), ())
config = msgspec.json.decode(b'{"routing_policy": "LastName"}', type=GatewayConfig)
candidates = [Candidate(name, 0, 0, 0) for name in ("a", "c", "b")]
for policies in (RoutingPolicies("Cost", 50.0), RoutingPolicies(config.routing_policy, 50.0)):
    assert policies.named(plan.served.routing_policy).choose(RequestView(), candidates).chosen.endpoint_id == "c"
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

PACKAGES = tuple(f"libs/{name}/pagemill_{name}" for name in ("protocol", "models", "api", "servers", "kube", "routing"))
PACKAGES += ("execution/pagemill_execution", "crds/pagemill_crds", "kernels/pagemill_kernels", "engine/pagemill_engine")
PACKAGES += ("gateway/pagemill_gateway", "operator/pagemill_operator")


def rows() -> dict[str, list[str]]:
    """Return the cells of the page's table by the kind of change."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: row[1:] for row in cells if row[0] != "Change"}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with the packages of the repository, in the same places; what is compiled stays so until its
    source changes."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.so"))
    return tmp_path


def make_change(copy: Path, change: Insertions) -> None:
    for file, insertions in change.items():
        path = copy / file
        for before, added in insertions:
            text = path.read_text() if before else ""
            assert text.count(before) == 1 or not before, f"{file}: {before!r}"
            path.write_text(text.replace(before, before + added) if before else added)


def compiled(copy: Path) -> Path:
    """Compile the copy's sampler and threads, without the other kernels and without optimisation, which takes half a
    second."""
    sources = [copy / NATIVE, copy / NATIVE.replace("sampling.cpp", "threads.cpp")]
    options = ["-std=c++17", "-fPIC", "-shared", "-pthread", "-w", "-ffp-contract=off"]
    found = copy / "compiled.so"
    subprocess.run(["c++", *options, "-o", str(found), *map(str, sources)], check=True)
    return found


@pytest.mark.slow
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
    folders = [(copy / package).parent for package in PACKAGES]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT / "tests" / "shared"]))}
    if NATIVE in change:
        environment |= {"COMPILED": str(compiled(copy)), "TRITON_INTERPRET": "1"}
    argv = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
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
