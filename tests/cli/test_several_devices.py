"""The commands of the how-to on several devices, and `pagemill up` with two ranks for each of two replicas."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
import yaml
from hung_processes import hang
from waiting import START_LIMIT_S, WAIT_LIMIT_S, wait_until

from pagemill.up.loading import load_files
from pagemill.up.session import missing_for
from pagemill_crds.models import LLMDeployment
from pagemill_kernels.cpu import library
from pagemill_operator.backends.local.settings import LocalSettings
from pagemill_operator.plan import make_plan

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}"),
]
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "use-several-devices.md"
Write = Callable[..., Path]


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_deployment_of_the_page_is_planned() -> None:
    one, on_gpus, of_pods = (make_plan(LLMDeployment.model_validate(yaml.safe_load(each))) for each in snippets("yaml"))
    assert (one.problems, one.ignored, on_gpus.problems, of_pods.problems) == ((), (), (), ())
    assert on_gpus.gpus_per_replica == 2
    assert one.groups[0].process.settings["engine"]["tensor_parallel_size"] == 2
    assert [each.field for each in of_pods.ignored] == ["spec.engine.podsPerReplica"]  # on one machine


@pytest.mark.sample("heads")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tensor-parallel-size 10 --threads 10", "9 attention heads cannot be divided among 10 ranks. Lower tensorP"),
        ("--pipeline-parallel-size 31 --threads 31", "30 layers cannot be divided into 31 stages. Lower pipelineParal"),
        ("--tensor-parallel-size 9 --threads 2", "are 9 processes that compute at the same time, but they may use 2 c"),
        ("--tensor-parallel-size 2 --nnodes 3", "cannot be divided equally among 3 nodes"),
        ("--tensor-parallel-size 2 --quantization no", "quantization"),
    ],
    ids=["heads", "layers", "cores", "nodes", "setting"],
)
def test_what_cannot_be_divided_is_refused_at_the_command_line(
    words: str, message: str, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "pagemill", "serve", *words.split(), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_LIMIT_S, env=environment)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())


def test_fewer_gpus_than_parts_are_named_before_anything_starts(write: Write) -> None:
    one = snippets("yaml")[0]
    document = yaml.safe_load(one)
    document["spec"]["resources"] = {"gpus": 1}
    document["spec"]["engine"]["pipelineParallel"] = 2
    found = list(missing_for(load_files([write("f.yaml", document)]).loaded, LocalSettings(gpus=("0", "1"))))
    assert len(found) == 1
    assert "asks for GPUs, one for each part of tensorParallel x pipelineParallel (4), but CUDA sees 2" in found[0]


@pytest.mark.full
def test_the_script_of_the_page_answers() -> None:
    (script,) = snippets("python")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=START_LIMIT_S)
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["Paris."]), done.stderr


@pytest.mark.full
@pytest.mark.parametrize("command", snippets("sh"))
def test_a_command_of_the_page_serves_on_two_ranks(command: str, tmp_path: Path, environment: dict[str, str]) -> None:
    words = [*command.split()[1:], "--port", "0", "--control-port", "0"]
    with Running(words, tmp_path, environment) as server:
        text = wait_until(lambda: said(server, "http://"), limit_s=START_LIMIT_S)
        assert len(followers(server.process.pid)) == 1
        url = re.search(r"http://127\.0\.0\.1:\d+", text)
        assert url is not None
        assert httpx.get(f"{url.group()}/v1/models", timeout=WAIT_LIMIT_S).status_code == 200


class Running:
    """A command of `pagemill` with its output in a file."""

    def __init__(self, words: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.output = folder / "output"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pagemill", *words], stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(WAIT_LIMIT_S)


def said(server: Running, text: str) -> str | None:
    assert server.process.poll() is None, server.output.read_text()
    output = server.output.read_text()
    return output if text in output else None


def followers(pid: int) -> list[psutil.Process]:
    found = psutil.Process(pid).children(recursive=True)
    return [each for each in found if "pagemill_execution.starting.rank_process" in each.cmdline()]


def busiest(ranks: list[psutil.Process]) -> psutil.Process:
    """Return the rank that computes."""
    before = [sum(rank.cpu_times()[:2]) for rank in ranks]

    def used() -> list[float]:
        return [sum(rank.cpu_times()[:2]) - start for rank, start in zip(ranks, before, strict=True)]

    wait_until(lambda: max(used()) > 0.1)
    return ranks[used().index(max(used()))]


def answer_of(url: str, disturb: Callable[[], None] | None = None) -> str:
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 300, "stream": True, "temperature": 0}
    text = ""
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=WAIT_LIMIT_S
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if disturb is not None and len(text) > 40:
                    disturb()
                    disturb = None
    return text


@pytest.mark.parametrize(
    ("parallel", "how"),
    [
        pytest.param("tensorParallel", "kill", marks=pytest.mark.slow),
        *(pytest.param("pipelineParallel", how, marks=pytest.mark.full) for how in ("kill", "stop")),
    ],
)
def test_a_stream_goes_on_at_the_other_replica_when_a_rank_is_lost(
    parallel: str, how: str, write: Write, tmp_path: Path, environment: dict[str, str]
) -> None:
    document = yaml.safe_load(snippets("yaml")[0])
    document["spec"] |= {"replicas": 2}
    document["spec"]["engine"] = {"maxModelLen": 1024, "dtype": "float32", parallel: 2}
    words = ["up", "-f", str(write("f.yaml", document)), "--port", "0", "--keep"]
    with Running(words, tmp_path, environment) as up:
        wait_until(lambda: said(up, "from start to first token"), limit_s=START_LIMIT_S)
        url = re.search(r"(http://127\.0\.0\.1:\d+)/v1", up.output.read_text())
        assert url is not None
        expected = answer_of(url.group(1))
        ranks = followers(up.process.pid)
        assert len(ranks) == 2

        lost: list[psutil.Process] = []

        def disturb() -> None:
            lost.append(busiest(ranks))
            if how == "kill":
                lost[0].send_signal(signal.SIGKILL)
            else:
                hang(lost[0].pid)

        assert answer_of(url.group(1), disturb) == expected
        assert lost
        wait_until(lambda: said(up, "RankLost"), limit_s=WAIT_LIMIT_S)
        wait_until(lambda: len(followers(up.process.pid)) == 2 and lost[0] not in followers(up.process.pid))
