"""The parts of a run. Each is a function of the device that fills its section; each can run alone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attention_cases
import kernel_cases
import peers
from case import measure
from measuring import Device
from models import SPECS, TINY
from paths import HERE, ROOT
from results import Section
from workloads import Job, fixed, floor_bytes, nano, output_tokens

from engine import MAX_MODEL_LEN, Engine, Online
from pagemill_protocol.model_spec import ModelSpec

RATES = (0.25, 0.5, 0.75)
"""Of the offline rate of the same requests."""
ONLINE_S = 20
"""Seconds over which requests arrive, about."""
TESTS_S = 440
"""Less than a section's own limit: tests that hang must not outlive it."""
ENGINE_TESTS = ("test_device_runner.py", "test_settled_memory.py", "test_triton_engine.py")
ENGINE_LIBRARIES = ("msgspec", "psutil", "transformers", "pydantic", "zmq")
WITH_PEERS = ("qwen3-0.6b", "llama-3.2-1b")
"""Models that transformers generates with in minutes."""


def smoke(device: Device, section: Section) -> None:
    """Under a minute: limits of the device, every kernel on a tiny shape, a tiny model from prompt to tokens."""
    limits(device, section)
    small = Device(tiny=True)
    measure(small, section, "kernels on tiny shapes", [*attention_cases.cases(small), *kernel_cases.cases(small)])
    found = Engine(small, TINY, forbids_waiting=True).offline(fixed(2, 5, 2, TINY.vocab_size))
    section.table("a tiny model", "requests", "steps", "s").add(2, found.num_steps, found.seconds)


def limits(device: Device, section: Section) -> None:
    table = section.table("measured limits", "copy GB/s", "bfloat16 product TFLOP/s")
    table.add(device.bytes_per_s / 1e9, device.flops / 1e12)


def tests(device: Device, section: Section) -> None:
    """The repository's tests of the Triton path on the device, where pytest and hypothesis are there."""
    table = section.table("tests of the Triton path", "result")
    absent = [
        name
        for name in ("pytest", "hypothesis", "pytest_asyncio", "pytest_timeout")
        if importlib.util.find_spec(name) is None
    ]
    if absent or device.tiny:
        table.add(f"not run: {', '.join(absent) or 'tiny sizes'}; `kernels` checks every kernel against its reference")
        return
    files = sorted(str(path) for path in (ROOT / "tests" / "kernels").glob("test_triton_*.py"))
    if _has_engine_libraries():
        files += [str(ROOT / "tests" / "engine" / "model" / name) for name in ENGINE_TESTS]
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--override-ini", "timeout=400", *files]
    folders = [*sys.path, str(ROOT / "tests" / "shared")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TESTS_S)
    table.add(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:])
    if done.returncode:
        raise AssertionError(done.stdout[-2000:])


def kernels(device: Device, section: Section) -> None:
    limits(device, section)
    measure(device, section, "kernels", kernel_cases.cases(device))


def attention(device: Device, section: Section) -> None:
    limits(device, section)
    measure(device, section, "attention", attention_cases.cases(device))


def engine(name: str, device: Device, section: Section) -> None:
    """Offline and online, as a share of what the memory's bandwidth allows."""
    ours = Engine(device, _spec(device, name))
    ready = section.table("start", "model", "weights GiB", "KV tokens", "load s", "compile s")
    ready.add(name, ours.weight_bytes / 2**30, ours.num_kv_tokens, ours.load_s, ours.compile_s)
    columns = ("requests", "s", "output tok/s", "% of roofline", "steps", "ms a step", "CPU ms a step")
    table = section.table(f"offline, {name}", "workload", *columns)
    rate = 0.0
    for workload, jobs in _workloads(device).items():
        found = ours.offline(jobs)
        floor_s = floor_bytes(jobs, ours.weight_bytes, ours.kv_bytes_per_token) / device.bytes_per_s
        each_ms = [1000 * seconds / found.num_steps for seconds in (found.seconds, found.cpu_s)]
        tokens_per_s = output_tokens(jobs) / found.seconds
        share = 100 * floor_s / found.seconds
        table.add(workload, len(jobs), found.seconds, tokens_per_s, share, found.num_steps, *each_ms)
        if workload == "128/128":
            rate = len(jobs) / found.seconds
    _online(device, section, name, ours, rate)


def peer(name: str, device: Device, section: Section) -> None:
    """transformers' static batches and vLLM on the nano workload, where they are importable."""
    spec, jobs = _spec(device, name), _workloads(device)["100-1024"]
    table = section.table(f"peers, {name}, workload 100-1024", "peer", "s", "output tok/s")
    runs: dict[str, Callable[[], tuple[float, int]]] = {
        f"transformers generate, batches of {peers.STATIC_BATCH}": lambda: peers.hugging_face(device, spec, jobs),
        "vLLM": lambda: peers.vllm(spec, jobs, MAX_MODEL_LEN),
    }
    for who, run in runs.items():
        try:
            seconds, num_tokens = run()
        except Exception as problem:
            table.add(who, "", f"{type(problem).__name__}: {str(problem)[:120]}")
            continue
        table.add(who, seconds, num_tokens / seconds)


SECTIONS: dict[str, Callable[[Device, Section], None]] = {
    "smoke": smoke,
    "tests": tests,
    "kernels": kernels,
    "attention": attention,
    **{f"engine-{name}": partial(engine, name) for name in SPECS},
    **{f"peers-{name}": partial(peer, name) for name in WITH_PEERS},
}


def _has_engine_libraries() -> bool:
    """The engine's tests need the libraries themselves, which our stand-ins are not."""
    found = [importlib.util.find_spec(name) for name in ENGINE_LIBRARIES]
    return all(spec is not None and HERE not in Path(spec.origin or "").parents for spec in found)


def _online(device: Device, section: Section, name: str, ours: Engine, offline_rate: float) -> None:
    table = section.table(
        f"online, {name}, 128/128", "requests/s", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms"
    )
    for share in RATES[:1] if device.tiny else RATES:
        rate = 1000.0 if device.tiny else offline_rate * share
        num_requests = 2 if device.tiny else max(8, int(rate * ONLINE_S))
        found = ours.online(_short(device, num_requests), rate)
        table.add(rate, *_percentiles_ms(found))


def _percentiles_ms(found: Online) -> list[float]:
    return [1000 * _at(values, share) for values in found for share in (0.5, 0.99)]


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _workloads(device: Device) -> dict[str, list[Job]]:
    if device.tiny:
        short = _short(device, 2)
        return {"100-1024": short, "128/128": short}
    return {"100-1024": nano(), "128/128": _short(device, 1024), "1000/1000": fixed(256, 1000, 1000)}


def _short(device: Device, num_requests: int) -> list[Job]:
    return fixed(num_requests, 5, 2, TINY.vocab_size) if device.tiny else fixed(num_requests, 128, 128)


def _spec(device: Device, name: str) -> ModelSpec:
    return TINY if device.tiny else SPECS[name]
