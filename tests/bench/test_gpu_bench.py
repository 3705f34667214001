"""`make bench-gpu` runs completely, on tiny shapes and without packages that it does not need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "bench" / "gpu"
NEEDED = ("torch", "triton", "numpy", "safetensors")
NOT_IN_PYTHON_3_12 = {"asynchat", "asyncore", "distutils", "imp", "smtpd"}
SECTIONS = [
    *("smoke", "tests-attention", "tests-sampling", "tests-products", "tests-rows", "tests-engine", "tests-answers"),
    *("kernels", "attention", "engine-qwen3-0.6b", "engine-llama-3.2-1b", "engine-llama-3.1-8b"),
    *("start-qwen3-0.6b", "peers-qwen3-0.6b", "peers-llama-3.2-1b"),
]
IN_SAMPLE = ["smoke", "kernels", "attention", "engine-qwen3-0.6b"]
"""One of each group of sections that differ only in shapes or files; a section is a process."""
RUN = """
import importlib.machinery, runpy, sys
class Bare:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {banned!r}:
            return self.finder.find_spec(name, path, target)
        stand_ins = [folder for folder in sys.path if folder.endswith("stand_ins")]
        return importlib.machinery.PathFinder.find_spec(name, stand_ins)
sys.meta_path[:] = map(Bare, sys.meta_path)
runpy.run_path({quick!r})["speed_up_interpreter"]()
sys.argv = {argv!r}
runpy.run_path({folder!r}, run_name="__main__")
"""


def installed_beside(needed: tuple[str, ...]) -> set[str]:
    """Return modules of all installed distributions that none of `needed` requires."""
    wanted, waiting = set(), list(needed)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in wanted:
            continue
        wanted.add(name)
        try:
            asked = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        waiting += [re.split(r"[\s;\[<>=!~(]", each)[0] for each in asked if "extra ==" not in each]
    modules = metadata.packages_distributions()
    return {
        module
        for module, names in modules.items()
        if not any(name.lower().replace("_", "-") in wanted for name in names) and not module.startswith("pagemill")
    }


def environment(**values: str) -> dict[str, str]:
    """Return the environment without the project's folders, which the command finds itself."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return {**kept, "OMP_NUM_THREADS": "1", **values}


def command(argv: list[str], **values: str) -> subprocess.CompletedProcess[str]:
    """Run the command; `argv` are options of Python, the command's folder, and its own options."""
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=240, env=environment(**values)
    )


def inside(*codes: str) -> list[Any]:
    """Run scripts next to the command's modules, one after the other; return their last lines, read as JSON."""
    head = f"import json, sys\nsys.path.insert(0, {str(GPU)!r})\nimport paths\n"
    runs = "".join(f"exec({code!r}, {{**globals()}})\nprint()\nprint('====')\n" for code in codes)
    done = subprocess.run(
        [sys.executable, "-c", head + runs], capture_output=True, text=True, timeout=240,
        env=environment(TRITON_INTERPRET="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    parts = done.stdout.split("\n\n====\n")
    return [json.loads(part.splitlines()[-1]) for part in parts[: len(codes)]]


class Ran(NamedTuple):
    sections: list[str]
    out: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(
    scope="module",
    params=[pytest.param(IN_SAMPLE, id="sample"), pytest.param(SECTIONS, id="all", marks=pytest.mark.full)],
)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    out = tmp_path_factory.mktemp("bench-gpu")
    banned = installed_beside(NEEDED)
    assert {"msgspec", "psutil", "transformers", "pytest"} <= banned
    assert not banned & {"torch", "triton", "numpy", "safetensors", "sympy"}
    argv = ["bench/gpu", "--sizes", "tiny", "--out", str(out), "--sections", *request.param]
    quick = str(ROOT / "tests" / "shared" / "quick_interpreter.py")
    code = RUN.format(banned=banned | NOT_IN_PYTHON_3_12, argv=argv, quick=quick, folder=str(GPU))
    argv = [sys.executable, "-c", code]
    values = environment(TRITON_INTERPRET="1")
    done = subprocess.run(argv, cwd=out, env=values, capture_output=True, text=True, timeout=280)
    return Ran(request.param, out, done)


def tables(out: Path, section: str) -> dict[str, Any]:
    found = json.loads((out / "results.json").read_text())["sections"]
    return {table["title"]: table for each in found if each["name"] == section for table in each["tables"]}


def test_every_section_needs_only_torch_triton_numpy_and_the_sources(ran: Ran) -> None:
    sections, out, done = ran
    assert done.returncode == 0, done.stdout + done.stderr
    assert "written: " in done.stdout
    found = json.loads((out / "results.json").read_text())
    assert found["machine"]["device"] == "Triton's interpreter"
    assert [(section["name"], section["error"]) for section in found["sections"]] == [(name, "") for name in sections]
    text = (out / "results.md").read_text()
    assert all(f"## {section}" in text for section in sections)


def test_kernels_are_measured_next_to_their_peers(ran: Ran) -> None:
    out = ran.out
    attention, kernels = tables(out, "attention")["attention"], tables(out, "kernels")["kernels"]
    who = {row[1] for row in attention["rows"]}
    assert who == {"pagemill", "pagemill, two launches", "torch SDPA", "torch FlexAttention"}
    error = attention["columns"].index("error")
    for row in attention["rows"]:
        assert float(row[error]) < 2e-2, f"{row[0]}, {row[1]}: the peer computes something else"
    assert {"sampler", "product", "rotation", "RMS", "SiLU", "rows", "inputs", "codes"} <= {
        row[0].split()[0].rstrip(",") for row in kernels["rows"] if row[1] == "pagemill"
    }


def test_the_engine_is_measured_in_all_figures_of_the_goals(ran: Ran) -> None:
    out = ran.out
    alike = tables(out, "smoke")["a tiny model beside the reference"]
    assert [row[3] for row in alike["rows"]] == [row[1] for row in alike["rows"]]
    assert len(alike["rows"]) == 2
    found = tables(out, "engine-qwen3-0.6b")
    offline = found["offline, qwen3-0.6b"]
    for column in ("output tok/s", "% of roofline", "CPU ms a step", "ms a step"):
        assert all(row[offline["columns"].index(column)] > 0 for row in offline["rows"])
    mixed = found["decodes beside a prompt, qwen3-0.6b"]
    assert [row[:2] for row in mixed["rows"]] == [[1, 5]]
    assert min(mixed["rows"][0][2:]) > 0
    idle = found["decodes under a profiler, qwen3-0.6b"]
    assert 0 <= idle["rows"][0][idle["columns"].index("device idle %")] <= 100
    online = found["online, qwen3-0.6b, 128/128"]
    assert all(value > 0 for value in online["rows"][0])


@pytest.mark.parametrize("ran", [pytest.param(SECTIONS, id="all", marks=pytest.mark.full)], indirect=True)
def test_starts_and_peers_are_measured(ran: Ran) -> None:
    out = ran.out
    start = tables(out, "start-qwen3-0.6b")["start"]
    values = dict(zip(start["columns"], start["rows"][0], strict=True))
    parts = [values[name] for name in ("process s", "load s", "compile s")]
    assert values["start to ready s"] == pytest.approx(sum(parts))
    assert parts[0] > 0
    peers = tables(out, "peers-qwen3-0.6b")["peers, qwen3-0.6b, workload 100-1024"]
    assert [row[1] for row in peers["rows"]] == ["", ""], "missing peers must have no figures"


# -- machines on which it cannot run -----------------------------------------------------------------------------


@pytest.mark.sample("no device")
@pytest.mark.parametrize(
    ("arguments", "values", "words"),
    [
        ((), {}, "no CUDA device is visible"),
        (("--sizes", "tiny"), {}, "no CUDA device is visible"),
        ((), {"TRITON_INTERPRET": "1"}, "use --sizes tiny"),
    ],
    ids=["no device", "tiny without interpreter", "full in the interpreter"],
)
def test_a_machine_without_a_device_is_reported_in_one_line(
    arguments: tuple[str, ...], values: dict[str, str], words: str
) -> None:
    done = command([str(GPU), *arguments], CUDA_VISIBLE_DEVICES="", **values)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_interpreter_without_the_packages_is_reported_in_one_line() -> None:
    done = command(["-I", "-S", str(GPU)])
    assert done.returncode == 1
    assert "has no torch, triton, numpy, safetensors; name another: make PYTHON=" in done.stderr
    assert "Traceback" not in done.stderr


FACTS = """
from driving import idle_share
from measuring import Device
from models import SPECS, RandomWeights
from sections import SECTIONS
from workloads import nano
from engine import weights_bytes
jobs, device = nano(), Device(tiny=True)
def size(spec):
    return weights_bytes(RandomWeights(spec), device) // device.dtype.itemsize
ranges = [[(0, 10)], [(0, 2), (8, 10)], [(5, 8), (0, 6), (1, 2), (9, 10)]]
print(json.dumps({
    "sections": list(SECTIONS),
    "sizes": {name: size(spec) for name, spec in SPECS.items()},
    "requests": len(jobs),
    "tokens": [sum(len(job.prompt_token_ids) for job in jobs), sum(job.num_output_tokens for job in jobs)],
    "idle": [idle_share(each) for each in ranges],
}))
"""


ON_A_DEVICE = """
import time
from types import SimpleNamespace
import torch
from driving import Driver
from engine import by_the_formulas
from measuring import Device
from models import TINY
from workloads import fixed
def spin():
    begin_s = time.thread_time()
    while time.thread_time() - begin_s < 0.02:
        pass
stream = SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=spin))
torch.cuda.current_stream = lambda: stream
device = Device(tiny=True)
device.on_gpu = True
device.synchronize = lambda: None
jobs = fixed(2, 5, 3, 64)
plain = by_the_formulas(device, TINY).offline(jobs)
driver = by_the_formulas(device, TINY)
runner = driver._core.runner
class InFlight:
    def __init__(self, result):
        self.result, self.error = result, None
launch, wait = runner.launch, runner.wait
runner.launch, runner.wait = lambda plan: InFlight(launch(plan)), lambda handle: wait(handle.result)
runner.info = runner.info._replace(overlaps=True)
driver = Driver(device, driver._core)
overlapped = driver.offline(jobs)
print(json.dumps([plain.num_steps, overlapped.num_steps, driver._waited_cpu_s]))
"""


# -- failures ------------------------------------------------------------------------------------------------------


CASES_THAT_FAIL = """
import torch
from case import Case, measure
from measuring import Device
from results import Section
ones = torch.ones(3)
def broken(): raise RuntimeError("two\\nlines | and a bar")
cases = [Case("differs", lambda: 2 * ones, lambda: ones), Case("raises", broken, lambda: ones),
         Case("good", lambda: ones, lambda: ones, 8.0, 8.0, {"a peer": broken})]
section = Section("s")
try:
    measure(Device(tiny=True), section, "kernels", cases)
except AssertionError as problem:
    print(json.dumps([str(problem), section.as_json()["tables"][0]["rows"], section.markdown()]))
"""


MAIN = """
import importlib.util, subprocess, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("command", paths.HERE / "__main__.py")
command = importlib.util.module_from_spec(spec)
spec.loader.exec_module(command)
"""


SECTION_THAT_FAILS = (
    MAIN
    + """
from measuring import Device
seen = []
def fails(device, section):
    section.table("t", "a").add(1)
    seen.append(json.loads(Path(PATH).read_text()))
    raise ValueError("no")
command.SECTIONS["fails"] = fails
command.run(Device(tiny=True), "fails", Path(PATH))
print(json.dumps([seen, json.loads(Path(PATH).read_text())]))
"""
)


SECTION_THAT_HANGS = f"""{MAIN}
hung = command.run_apart("smoke", 0.0)
argv = ["sh", "-c", "sleep 1000 & echo $!; wait"]
group = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE, text=True)
child = Path("/proc") / group.stdout.readline().strip() / "stat"
def lives():
    try:
        return child.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
lived = lives()
command.end_group(group)
while lives():
    time.sleep(0.01)
died = command.run_apart("no such section")
print(json.dumps([hung.error, lived, group.returncode, died.error]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of scripts in one process, which imports torch once."""
    path = str(tmp_path_factory.mktemp("section") / "section.json")
    codes = {
        "facts": FACTS,
        "on a device": ON_A_DEVICE,
        "cases that fail": CASES_THAT_FAIL,
        "section that fails": f"PATH = {path!r}\n{SECTION_THAT_FAILS}",
        "section that hangs": SECTION_THAT_HANGS,
    }
    return dict(zip(codes, inside(*codes.values()), strict=True))


def test_a_failed_case_costs_its_own_row_and_fails_the_section_at_its_end(found: dict[str, Any]) -> None:
    problem, rows, markdown = found["cases that fail"]
    assert problem == "2 of 3 cases failed: differs; raises"
    assert [(row[0], row[1]) for row in rows] == [
        *(("differs", "pagemill"), ("raises", "pagemill"), ("good", "pagemill"), ("good", "a peer"))
    ]
    assert "differs from its reference by 1" in rows[0][-1]
    assert rows[2][-1] == "0.0e+00"
    assert rows[3][-1] == "RuntimeError: two lines | and a bar"
    assert {line.replace("\\|", "").count("|") for line in markdown.splitlines() if line.startswith("|")} == {9}


def test_a_failed_section_keeps_its_results(found: dict[str, Any]) -> None:
    before, kept = found["section that fails"]
    assert before[0]["tables"] == [{"title": "t", "columns": ["a"], "rows": [[1]]}], (
        "results must be written while the section runs"
    )
    assert kept["error"] == "ValueError: no"
    assert kept["tables"] == before[0]["tables"]


def test_a_section_that_hangs_or_dies_is_ended_with_all_its_processes(found: dict[str, Any]) -> None:
    assert found["section that hangs"] == ["it was ended after 0 s", True, -9, "the process returned 2"]


@pytest.mark.full
def test_tests_run_without_installed_packages_and_include_every_file_with_device_tests() -> None:
    ((problem, text, summary, files),) = inside("""
import own_tests
path = own_tests.KERNELS / "test_triton_request_rows.py"
files = sorted({each.name for group in own_tests.GROUPS.values() for each in group})
problem, text = own_tests.run_pytest([path], 200)
print(json.dumps([problem, text, own_tests.summary_of(text), files]))
""")
    assert problem == "", text
    assert re.search(r"\d+ passed", summary)
    kernels = {path.name for path in (ROOT / "tests" / "kernels").glob("test_triton_*.py")}
    for_no_device = {"test_triton_compiled.py", "test_triton_offsets.py"}
    assert kernels - set(files) == for_no_device
    with_a_mark = {
        path.name for path in (ROOT / "tests").rglob("test_*.py") if "\n@pytest.mark.gpu" in path.read_text()
    }
    assert with_a_mark <= set(files)


# -- measurements ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts(found: dict[str, Any]) -> dict[str, Any]:
    facts = found["facts"]
    assert isinstance(facts, dict)
    return facts


def test_every_section_is_run_by_a_test(facts: dict[str, Any]) -> None:
    assert facts["sections"] == SECTIONS


def test_shapes_and_lengths_are_the_documented_ones(facts: dict[str, Any]) -> None:
    assert facts["sizes"] == {
        "qwen3-0.6b": 596_049_920,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.1-8b": 8_030_261_248,
    }
    assert (facts["requests"], facts["tokens"]) == (256, [142_827, 133_966])


def test_idle_time_is_the_time_between_ranges_that_may_overlap(facts: dict[str, Any]) -> None:
    assert facts["idle"] == pytest.approx([0.0, 0.6, 0.1])


def test_waiting_time_is_measured_for_runners_that_wait(found: dict[str, Any]) -> None:
    """The formulas without a device wait for nothing."""
    num_steps, num_overlapped, waited_s = found["on a device"]
    assert num_steps == num_overlapped > 0
    assert waited_s >= 0.02 * num_steps


@pytest.mark.full
def test_transformers_generates_static_batches_of_the_same_shape() -> None:
    (found,) = inside("""
import transformers
from dataclasses import replace
import peers
from measuring import Device
from models import TINY
from workloads import Job
transformers.logging.set_verbosity_error()
jobs = [Job([1, 2, 3], 2), Job([4], 3), Job([5, 6], 1)]
peers.STATIC_BATCH = 2
seconds, num_tokens = peers.hugging_face(Device(tiny=True), TINY, jobs)
print(json.dumps([seconds > 0, num_tokens]))
""")
    assert found == [True, 6]
