"""`make bench-gpu` runs completely, on tiny shapes and without packages that it does not need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from distributions import installed_beside, required_by

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "bench" / "gpu"
NEEDED = ("torch", "triton", "numpy", "safetensors")
NOT_IN_PYTHON_3_12 = {"asynchat", "asyncore", "distutils", "imp", "smtpd"}
SECTIONS = [
    *(
        "smoke",
        "tests-engine",
        "tests-kernels",
        "serve-qwen3-0.6b",
        "offline-llama-3.1-8b",
        "steps-llama-3.1-8b",
        "steps-gpt-oss-20b",
    ),
    *(
        "steps-qwen3-30b-a3b",
        "steps-qwen3.5-9b",
        "steps-qwen3.6-35b-a3b",
        "attention",
        "kernels",
        "offline-qwen3-0.6b",
        "engine-qwen3-0.6b",
        "start-qwen3-0.6b",
    ),
    *("engine-llama-3.1-8b", "engine-llama-3.2-1b"),
]
IN_SAMPLE = ["smoke", "serve-qwen3-0.6b", "offline-llama-3.1-8b", "steps-gpt-oss-20b", "engine-qwen3-0.6b"]
"""One of each kind of sections, which differ only in shapes or files; the others also run on tiny shapes."""
BARE = ["steps-gpt-oss-20b", "attention", "kernels", "engine-qwen3-0.6b"]
"""Sections that need nothing but torch, Triton, numpy and safetensors: one of each kind."""
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


def environment(**values: str) -> dict[str, str]:
    """Return the environment without the project's folders, which the command finds itself."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return {**kept, "OMP_NUM_THREADS": "1", **values}


def command(argv: list[str], timeout_s: float = 240, **values: str) -> subprocess.CompletedProcess[str]:
    """Run the command; `argv` are options of Python, the command's folder, and its own options."""
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=timeout_s, env=environment(**values)
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
    out: Path
    done: subprocess.CompletedProcess[str]
    sections: list[str]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "rows.jsonl").read_text().splitlines()]

    def of(self, section: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["section"] == section]


@pytest.fixture(
    scope="module",
    params=[pytest.param(IN_SAMPLE, id="sample"), pytest.param(SECTIONS, id="all", marks=pytest.mark.full)],
)
def dry_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Sections that compute nothing."""
    out = tmp_path_factory.mktemp("dry-run")
    argv = [str(GPU), "--sizes", "none", "--out", str(out), "--sections", *request.param]
    return Ran(out, command(argv, 290, TRITON_INTERPRET="1"), request.param)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Sections on tiny shapes, without packages that they do not need."""
    out = tmp_path_factory.mktemp("bench-gpu")
    banned = installed_beside(required_by(NEEDED))
    assert {"msgspec", "psutil", "transformers", "pytest"} <= banned
    assert not banned & {"torch", "triton", "numpy", "safetensors", "sympy"}
    argv = ["bench/gpu", "--sizes", "tiny", "--out", str(out), "--sections", *BARE]
    quick = str(ROOT / "tests" / "shared" / "quick_interpreter.py")
    code = RUN.format(banned=banned | NOT_IN_PYTHON_3_12, argv=argv, quick=quick, folder=str(GPU))
    argv = [sys.executable, "-c", code]
    values = environment(TRITON_INTERPRET="1")
    done = subprocess.run(argv, cwd=out, env=values, capture_output=True, text=True, timeout=280)
    return Ran(out, done, BARE)


def test_a_dry_run_goes_through_its_sections_and_writes_a_file_for_each(dry_run: Ran) -> None:
    assert dry_run.done.returncode == 0, dry_run.done.stdout + dry_run.done.stderr
    assert [row["error"] for row in dry_run.rows if row["error"]] == []
    assert list(dict.fromkeys(row["section"] for row in dry_run.rows)) == dry_run.sections
    for section in dry_run.sections:
        lines = (dry_run.out / f"{section}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == dry_run.of(section)


def test_a_row_says_what_was_measured_where_and_beside_what(dry_run: Ran) -> None:
    names = {"commit", "date", "card", "driver", "software", "code", "section", "shape", "unit", "ours", "peer_name"}
    assert all(set(row) == names | {"peer", "limit", "ratio", "error"} for row in dry_run.rows)
    assert {row["card"] for row in dry_run.rows} == {"Triton's interpreter"}
    assert all(row["code"] and row["software"].startswith("Python 3") for row in dry_run.rows)


def test_servers_and_engines_stand_beside_vllm_with_the_ratio_last(dry_run: Ran) -> None:
    for section in ("serve-qwen3-0.6b", "offline-llama-3.1-8b"):
        rows = dry_run.of(section)
        ours = {row["shape"]: row["ours"] for row in rows if not row["peer_name"] and row["unit"] == "tokens/s"}
        beside = [row for row in rows if row["peer_name"] == "vLLM" and row["unit"] == "tokens/s"]
        assert ours.keys() == {row["shape"] for row in beside}
        for row in beside:
            assert row["ours"] == ours[row["shape"]]
            assert row["ratio"] == pytest.approx(row["ours"] / row["peer"], rel=1e-2, abs=1e-4)
    assert list(dry_run.rows[0])[-2:] == ["error", "ratio"]


def test_sections_without_servers_need_only_torch_triton_numpy_and_the_sources(ran: Ran) -> None:
    assert ran.done.returncode == 0, ran.done.stdout + ran.done.stderr
    assert list(dict.fromkeys(row["section"] for row in ran.rows)) == BARE
    assert [row["error"] for row in ran.rows if row["error"]] == []


def test_kernels_are_measured_next_to_their_peers(ran: Ran) -> None:
    peers = {row["peer_name"] for row in ran.of("attention")} - {""}
    assert peers == {"pagemill, two launches", "torch SDPA", "torch FlexAttention"}
    shapes = {row["shape"].split()[0].rstrip(",") for row in ran.of("kernels") if not row["peer_name"]}
    assert {"sampler", "product", "rotation", "RMS", "SiLU", "rows", "inputs", "codes"} <= shapes
    assert all(row["ours"] > 0 for row in ran.of("kernels"))


def test_the_engine_is_measured_in_all_figures_of_the_goals(ran: Ran) -> None:
    found = {(row["shape"], row["unit"]): row for row in ran.of("engine-qwen3-0.6b")}
    offline = found["offline, 100-1024", "tokens/s"]
    assert offline["ours"] > 0
    assert offline["limit"] > 0
    assert found["offline, 100-1024, CPU time of a step", "ms"]["ours"] > 0
    assert 0 <= found["2 decodes", "% of a profiler's trace idle"]["ours"] <= 100
    assert min(found["step of 1 decodes and 5 tokens of a prompt", "ms"][who] for who in ("ours", "peer")) > 0
    assert min(found["2 at once, predicted wrongly", "tokens/s"][who] for who in ("ours", "peer")) > 0
    online = [row["ours"] for (shape, _), row in found.items() if shape.startswith("online")]
    assert len(online) == 4
    assert min(online) > 0
    parts = [found[f"start, {part}", "s"]["ours"] for part in ("imports", "weights", "compiling and CUDA graphs")]
    assert found["start to ready", "s"]["ours"] == pytest.approx(sum(parts), rel=1e-3)


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
from models import CONFIGS, RandomWeights, spec_of
from plan import SECTIONS
from workloads import nano
from engine import weights_bytes
jobs, device = nano(), Device(tiny=True)
def size(spec):
    return weights_bytes(RandomWeights(spec), device) // device.dtype.itemsize
ranges = [[(0, 10)], [(0, 2), (8, 10)], [(5, 8), (0, 6), (1, 2), (9, 10)]]
print(json.dumps({
    "sections": list(SECTIONS),
    "sizes": {name: size(spec_of(name)) for name in CONFIGS},
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
from dataclasses import asdict
from case import Case, measure
from measuring import Device
from rows import Machine, Section
ones = torch.ones(3)
def broken(): raise RuntimeError("two\\nlines | and a bar")
cases = [Case("differs", lambda: 2 * ones, lambda: ones), Case("raises", broken, lambda: ones),
         Case("good", lambda: ones, lambda: ones, 8.0, 8.0, {"a peer": broken, "another": lambda: 3 * ones})]
section = Section("s", Machine("a card", "1", "versions", "abc", "2026-11-28"))
try:
    measure(Device(tiny=True), section, cases)
except AssertionError as problem:
    print(json.dumps([str(problem), [asdict(row) for row in section.rows]]))
"""


KNOWN_CASES = """
import torch
from case import Case, measure
from measuring import Device
from rows import Machine, Section
runs = []
def case(name):
    def run():
        runs.append(name)
        return torch.ones(3)
    return Case(name, run, lambda: torch.ones(3), peers={"peer": run})
machine = Machine("a card", "1", "versions", "abc", "2026-11-28")
before = Section("s", machine)
measure(Device(tiny=True), before, [case("known")])
runs.clear()
section = Section("s", machine, before={row.key: row for row in before.rows})
measure(Device(tiny=True), section, [case("known"), case("new")])
print(json.dumps([sorted(set(runs)), [row.shape for row in section.rows]]))
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
from plan import Entry
from rows import Machine
seen = []
def fails(device, section):
    section.add("one", "us", 1.0)
    seen.append((FOLDER / "fails.jsonl").read_text().count("one"))
    raise ValueError("no")
command.SECTIONS["fails"] = Entry(fails, 1.0)
device = Device(tiny=True)
fine = command.run(device, command.about(device, "abc"), "fails", FOLDER, False)
rows = [json.loads(line) for line in (FOLDER / "rows.jsonl").read_text().splitlines()]
print(json.dumps([seen, fine, [[row["shape"], row["error"]] for row in rows]]))
"""
)


SECTION_THAT_HANGS = f"""{MAIN}
from types import SimpleNamespace
from measuring import Device
options = SimpleNamespace(out=FOLDER / "hung", again=False)
machine = command.about(Device(tiny=True), "abc")
fine = command.run_apart("smoke", options, machine, 0.0)
rows = [json.loads(line) for line in (options.out / "rows.jsonl").read_text().splitlines()]
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
print(json.dumps([fine, rows[0]["error"], lived, group.returncode]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of scripts in one process, which imports torch once."""
    folder = f"from pathlib import Path\nFOLDER = Path({str(tmp_path_factory.mktemp('section'))!r})\n"
    codes = {
        "facts": FACTS,
        "on a device": ON_A_DEVICE,
        "cases that fail": CASES_THAT_FAIL,
        "known cases": KNOWN_CASES,
        "section that fails": folder + SECTION_THAT_FAILS,
        "section that hangs": folder + SECTION_THAT_HANGS,
    }
    return dict(zip(codes, inside(*codes.values()), strict=True))


def test_a_failed_case_costs_its_own_row_and_fails_the_section_at_its_end(found: dict[str, Any]) -> None:
    problem, rows = found["cases that fail"]
    assert problem == "2 of 3 cases failed: differs; raises"
    assert [(row["shape"], row["peer_name"]) for row in rows] == [
        *(("differs", ""), ("raises", ""), ("good", ""), ("good", "a peer"), ("good", "another"))
    ]
    assert "differs from its reference by 1" in rows[0]["error"]
    assert rows[2]["error"] == ""
    assert rows[2]["ours"] == rows[3]["ours"] > 0
    assert rows[3]["error"] == "RuntimeError: two lines | and a bar"
    assert "differs from the reference by 2" in rows[4]["error"]
    assert rows[4]["peer"] is None, "a peer that computes something else has no figure"


def test_what_an_earlier_run_measured_of_the_same_code_is_left_out(found: dict[str, Any]) -> None:
    assert found["known cases"] == [["new"], ["new", "new"]]


def test_a_failed_section_keeps_its_results(found: dict[str, Any]) -> None:
    before, fine, rows = found["section that fails"]
    assert before == [1], "rows must be written while the section runs"
    assert not fine
    assert rows == [["one", ""], ["the section", "ValueError: no"]]


def test_a_section_that_hangs_is_ended_with_all_its_processes(found: dict[str, Any]) -> None:
    assert found["section that hangs"] == [False, "it was ended after 0 s", True, -9]


@pytest.mark.full
def test_tests_run_without_installed_packages() -> None:
    ((problem, text, counts),) = inside("""
import own_tests
path = own_tests.ROOT / "tests/kernels/test_triton_request_rows.py"
problem, text = own_tests.run_pytest([path], "", 1, 200)
print(json.dumps([problem, text, own_tests.counted(text)]))
""")
    assert problem == "", text
    assert counts["passed"] > 0


# -- measurements ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts(found: dict[str, Any]) -> dict[str, Any]:
    facts = found["facts"]
    assert isinstance(facts, dict)
    return facts


def test_the_most_valuable_sections_come_first(facts: dict[str, Any]) -> None:
    assert facts["sections"] == SECTIONS


def test_shapes_and_lengths_are_the_documented_ones(facts: dict[str, Any]) -> None:
    assert facts["sizes"] == {
        "qwen3-0.6b": 596_049_920,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.1-8b": 8_030_261_248,
        "qwen3-30b-a3b": 30_532_122_624,
        "gpt-oss-20b": 20_914_757_184,
        "qwen3.5-9b": 8_953_803_264,
        "qwen3.6-35b-a3b": 34_660_610_688,
        "tiny": 9_856,
    }
    assert (facts["requests"], facts["tokens"]) == (256, [142_827, 133_966])


def test_idle_time_is_the_time_between_ranges_that_may_overlap(facts: dict[str, Any]) -> None:
    assert facts["idle"] == pytest.approx([0.0, 0.6, 0.1])


def test_waiting_time_is_measured_for_runners_that_wait(found: dict[str, Any]) -> None:
    """The formulas without a device wait for nothing."""
    num_steps, num_overlapped, waited_s = found["on a device"]
    assert num_steps == num_overlapped > 0
    assert waited_s >= 0.02 * num_steps
