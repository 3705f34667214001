"""The sections of a run. Each is a function of the device that fills its section; each can run alone."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import attention_cases
import kernel_cases
import peers
import torch
from case import Case, measure
from driving import Online
from measuring import Device
from models import SPECS, TINY
from own_tests import GROUPS, run_group
from results import Section, reported
from workloads import Job, fixed, floor_bytes, nano, output_tokens

from engine import MAX_MODEL_LEN, MAX_SEQS, Engine, by_the_formulas
from pagemill_models.spec.model_spec import ModelSpec

RATES = (0.25, 0.5, 0.75)
"""Shares of the offline rate of the same requests."""
ONLINE_S = 8
"""Approximate seconds over which requests arrive."""
WITH_PEERS = ("qwen3-0.6b", "llama-3.2-1b")
"""Models for which transformers' generation takes only minutes."""
STARTED = "qwen3-0.6b"
"""The model whose start is measured again."""
PROFILED_STEPS = 40
SHOWN_KERNELS = 16
MIXED = ((0, 128), (16, 128), (64, 128), (64, 512), (224, 32), (224, 128), (224, 512), (224, 1024), (224, 2000))
"""Numbers of decoding requests and of a prompt's tokens beside them, in the measured steps."""
MIXED_STEPS = 16


def smoke(device: Device, section: Section) -> None:
    """Check in under a minute: device limits, every kernel on a tiny shape, a tiny model from prompt to tokens."""
    limits(device, section)
    small = Device(tiny=True)
    parts: list[Callable[[], None]] = [
        lambda: measure(small, section, "attention on tiny shapes", _alone(attention_cases.cases(small))),
        lambda: measure(small, section, "kernels on tiny shapes", _alone(kernel_cases.cases(small))),
        # Both sides use float32: with fewer bits, the references themselves would answer differently on a device.
        lambda: answers(Device(tiny=True, dtype=torch.float32), section),
    ]
    problems = [problem for part in parts if (problem := _problem_of(part)) is not None]
    if problems:
        raise AssertionError("; ".join(problems))


def _alone(cases: list[Case]) -> list[Case]:
    """Remove the peers, whose compilers would take longer than everything else."""
    return [replace(case, peers={}) for case in cases]


def answers(device: Device, section: Section) -> None:
    """Check that a tiny model, in chunks, batches and CUDA graphs, answers like the reference."""
    jobs = [Job(job.prompt_token_ids[:length], 6) for job, length in zip(fixed(3, 20, 0, 64), (1, 5, 20), strict=True)]
    table = section.table("a tiny model beside the reference", "temperature", "requests", "tokens", "alike")
    ours, formulas = Engine(device, TINY, forbids_waiting=True).driver, by_the_formulas(device, TINY)
    different = 0
    for temperature in (0.0, 0.8):
        pairs = list(zip(ours.answers(jobs, temperature), formulas.answers(jobs, temperature), strict=True))
        alike = sum(answer == expected for answer, expected in pairs)
        table.add(temperature, len(jobs), output_tokens(jobs), alike)
        different += len(jobs) - alike
    if different:
        raise AssertionError(f"{different} answers of a tiny model differ from the reference's")


def limits(device: Device, section: Section) -> None:
    """Measure the device's limits before anything else takes its memory, and release that memory."""
    table = section.table("measured limits", "copy GB/s", "bfloat16 product TFLOP/s")
    table.add(device.bytes_per_s / 1e9, device.flops / 1e12)
    device.release()


def kernels(device: Device, section: Section) -> None:
    limits(device, section)
    measure(device, section, "kernels", kernel_cases.cases(device))


def attention(device: Device, section: Section) -> None:
    limits(device, section)
    measure(device, section, "attention", attention_cases.cases(device))


def engine(name: str, device: Device, section: Section) -> None:
    """Measure offline and online rates, their share of the bandwidth's limit, and how long the device is idle."""
    ours = _started(name, device, section)
    columns = ("requests", "s", "output tok/s", "% of roofline", "steps", "ms a step", "CPU ms a step", "preempted")
    table = section.table(f"offline, {name}", "workload", *columns)
    rate = 0.0
    for workload, jobs in _workloads(device).items():
        found = ours.driver.offline(jobs)
        floor_s = floor_bytes(jobs, ours.weight_bytes, ours.kv_bytes_per_token) / device.bytes_per_s
        each_ms = [1000 * seconds / found.num_steps for seconds in (found.seconds, found.cpu_s)]
        rates = [output_tokens(jobs) / found.seconds, 100 * floor_s / found.seconds]
        table.add(workload, len(jobs), found.seconds, *rates, found.num_steps, *each_ms, found.num_preemptions)
        if workload == "128/128":
            rate = len(jobs) / found.seconds
    _idle(device, section, name, ours)
    _mixed(device, section, name, ours)
    _online(device, section, name, ours, rate)


def start(name: str, device: Device, section: Section) -> None:
    """Measure the start again, with the kernels that the engine's section left in Triton's cache."""
    _started(name, device, section)


def peer(name: str, device: Device, section: Section) -> None:
    """Measure transformers' static batches and vLLM on the nano workload, if they are importable."""
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
            table.add(who, "", reported(problem))
            continue
        finally:
            device.release()
        table.add(who, seconds, num_tokens / seconds)


SECTIONS: dict[str, Callable[[Device, Section], None]] = {
    "smoke": smoke,
    **{name: partial(run_group, name) for name in GROUPS},
    "kernels": kernels,
    "attention": attention,
    **{f"engine-{name}": partial(engine, name) for name in SPECS},
    f"start-{STARTED}": partial(start, STARTED),
    **{f"peers-{name}": partial(peer, name) for name in WITH_PEERS},
}


def _problem_of(part: Callable[[], None]) -> str | None:
    """Run a part; return its error or None, so that later parts run nevertheless."""
    try:
        part()
    except Exception as problem:
        traceback.print_exc()
        return reported(problem, 600)
    return None


def _started(name: str, device: Device, section: Section) -> Engine:
    """Start an engine and report the times since the process began; measuring the limits is excluded."""
    imports_s = _process_age_s()
    limits(device, section)
    ours = Engine(device, _spec(device, name))
    columns = ("weights GiB", "KV tokens", "process s", "load s", "compile s", "start to ready s")
    table = section.table("start", "model", *columns)
    parts_s = (imports_s, ours.load_s, ours.compile_s)
    table.add(name, ours.weight_bytes / 2**30, ours.num_kv_tokens, *parts_s, sum(parts_s))
    return ours


def _process_age_s() -> float:
    """Return the process's age by the kernel's clock, so that the interpreter's own start counts."""
    behind_the_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began_s = int(behind_the_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s


def _idle(device: Device, section: Section, name: str, ours: Engine) -> None:
    """Measure the idle share; a profiler that may not access the device costs only the row."""
    table = section.table(f"decodes under a profiler, {name}", "requests", "steps", "ms a step", "device idle %")
    num_requests, num_steps = (2, 2) if device.tiny else (MAX_SEQS, PROFILED_STEPS)
    jobs = [Job(job.prompt_token_ids, 3 * num_steps) for job in _short(device, num_requests)]
    try:
        found = ours.driver.profile(jobs, num_steps)
    except (RuntimeError, ValueError) as problem:
        table.add(num_requests, num_steps, "", reported(problem))
        return
    table.add(num_requests, num_steps, 1000 * found.step_s, 100 * found.idle)
    longest = section.table(f"the longest kernels of these decodes, {name}", "kernel", "launches a step", "us a step")
    for kernel, (launches, seconds) in list(found.kernels.items())[:SHOWN_KERNELS]:
        longest.add(kernel[:80].replace("|", "/"), launches, 1e6 * seconds)


def _mixed(device: Device, section: Section, name: str, ours: Engine) -> None:
    """Measure mixed steps; steps larger than any CUDA graph are launched kernel by kernel in both columns."""
    columns = ("decodes", "tokens of a prompt", "ms a step", "ms a step, without recordings")
    table = section.table(f"decodes beside a prompt, {name}", *columns)
    num_steps = 2 if device.tiny else MIXED_STEPS
    for num_decodes, num_tokens in ((1, 5),) if device.tiny else MIXED:
        jobs = [Job(job.prompt_token_ids, 2 * num_steps + 8) for job in _short(device, num_decodes)]
        prompts = fixed(num_steps, num_tokens, 1, TINY.vocab_size)
        recorded_s = ours.driver.beside(jobs, prompts)
        with ours.launched_piece_by_piece():
            table.add(num_decodes, num_tokens, 1000 * recorded_s, 1000 * ours.driver.beside(jobs, prompts))


def _online(device: Device, section: Section, name: str, ours: Engine, offline_rate: float) -> None:
    table = section.table(
        f"online, {name}, 128/128", "requests/s", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms"
    )
    for share in RATES[:1] if device.tiny else RATES:
        rate = 1000.0 if device.tiny else offline_rate * share
        num_requests = 2 if device.tiny else max(8, int(rate * ONLINE_S))
        found = ours.driver.online(_short(device, num_requests), rate)
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
