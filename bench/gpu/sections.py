"""What the sections of a run measure. `plan.SECTIONS` names them, in the order in which they run.

Each section is a function of the device that adds its rows; each can run alone.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import attention_cases
import kernel_cases
import torch
from case import Case, measure, reported
from comparing import serving
from driving import Online
from measuring import Device
from models import CONFIGS, TINY, config_of, spec_of
from own_tests import is_installed
from rows import Section
from workloads import Job, fixed, floor_bytes, nano, output_tokens, prefill_flops, read_bytes, state_bytes

from engine import MAX_MODEL_LEN, MAX_SEQS, Engine, by_the_formulas
from pagemill_models.spec.model_spec import ModelSpec

RATES = (0.25, 0.5, 0.75)
"""Shares of the offline rate of the same requests."""
ONLINE_S = 8
"""Approximate seconds over which requests arrive."""
PROFILED_STEPS = 40
DECODES, PROMPTS = (1, 64, 256), (8192, 32_768)
"""Numbers of decoding requests and lengths of prompts of which single steps are measured."""
CONTEXT, LONGEST = 512, 33_024
MIXED = ((64, 128), (224, 128), (224, 512), (224, 2000))
"""Numbers of decoding requests and of a prompt's tokens beside them, in the measured steps."""
MIXED_STEPS = 16
PREDICTED = (1, 64)
"""Numbers of requests whose answers are predicted."""
FILLED = 0.8
"""Share of the device's memory that the weights of a model may take; the rest is cache and a step's memory."""


def smoke(device: Device, section: Section) -> None:
    """Check in a minute: device limits, each kernel on a tiny shape, a tiny model from prompt to tokens, the server."""
    limits(device, section)
    small = Device(tiny=True, is_dry_run=device.is_dry_run)
    parts: list[Callable[[], None]] = [
        lambda: measure(small, section, _alone(attention_cases.cases(small))),
        lambda: measure(small, section, _alone(kernel_cases.cases(small))),
        # Both sides use float32: with fewer bits, the references themselves would answer differently on a device.
        lambda: answers(Device(tiny=True, dtype=torch.float32, is_dry_run=device.is_dry_run), section),
    ]
    if is_installed("uvicorn") and is_installed("zmq"):
        parts.append(lambda: serving(device, section))
    problems = [problem for part in parts if (problem := _problem_of(part)) is not None]
    if problems:
        raise AssertionError("; ".join(problems))


def _alone(cases: list[Case]) -> list[Case]:
    """Remove the peers, whose compilers would take longer than everything else."""
    return [replace(case, peers={}, name=f"tiny: {case.name}") for case in cases]


def answers(device: Device, section: Section) -> None:
    """Check that a tiny model, in chunks, batches and CUDA graphs, answers like the reference."""
    jobs = [Job(job.prompt_token_ids[:length], 6) for job, length in zip(fixed(3, 20, 0, 64), (1, 5, 20), strict=True)]
    ours, formulas = Engine(device, TINY, forbids_waiting=True).driver, by_the_formulas(device, TINY)
    different = 0
    for temperature in (0.0, 0.8):
        pairs = list(zip(ours.answers(jobs, temperature), formulas.answers(jobs, temperature), strict=True))
        alike = sum(answer == expected or device.is_dry_run for answer, expected in pairs)
        section.add(f"a tiny model at temperature {temperature}", "answers alike", alike, limit=len(jobs))
        different += len(jobs) - alike
    if different:
        raise AssertionError(f"{different} answers of a tiny model differ from the reference's")


def limits(device: Device, section: Section) -> None:
    """Measure the device's limits before anything else takes its memory, and release that memory."""
    section.add("copy, bytes read and written", "GB/s", device.bytes_per_s / 1e9)
    section.add("bfloat16 matmul of 8,192 x 8,192 x 8,192", "TFLOP/s", device.flops / 1e12)
    device.release()


def kernels(device: Device, section: Section) -> None:
    limits(device, section)
    measure(device, section, kernel_cases.cases(device))


def attention(device: Device, section: Section) -> None:
    limits(device, section)
    measure(device, section, attention_cases.cases(device))


def steps(name: str, device: Device, section: Section) -> None:
    """Measure single steps of a model, with as many of its layers as fit: decodes and long prompts."""
    spec, of_all = fitting(name, device)
    ours = _started(name, of_all, spec, device, section, LONGEST)
    config = config_of(name, spec.num_layers, tiny=device.tiny)
    for num_decodes in (2,) if device.tiny else DECODES:
        shape = f"step of {num_decodes} decodes at {CONTEXT} tokens{of_all}"
        num_steps = 2 if device.tiny else PROFILED_STEPS
        jobs = [Job(job.prompt_token_ids, 3 * num_steps) for job in _prompts(device, num_decodes, CONTEXT)]
        num_bytes = read_bytes(config, spec, num_decodes) + num_decodes * state_bytes(spec)
        num_bytes += num_decodes * CONTEXT * ours.kv_bytes_per_token
        if not section.has(shape, "ms"):
            step_ms = 1000 * ours.driver.decode_s(jobs, num_steps)
            section.add(shape, "ms", step_ms, limit=1000 * num_bytes / device.bytes_per_s)
    for length in (9,) if device.tiny else PROMPTS:
        shape = f"prompt of {length} tokens{of_all}"
        if not section.has(shape, "ms"):
            jobs = [Job(job.prompt_token_ids, 1) for job in _prompts(device, 1, length)]
            ours.driver.offline(jobs)
            taken_ms = 1000 * ours.driver.offline(jobs).seconds
            section.add(shape, "ms", taken_ms, limit=1000 * prefill_flops(config, spec, length) / device.flops)


def fitting(name: str, device: Device) -> tuple[ModelSpec, str]:
    """Return the model with as many layers as the device's memory holds, and words that say how many of them."""
    whole = CONFIGS[name]["num_hidden_layers"]
    if device.tiny:
        return spec_of(name, tiny=True), ""
    free = torch.cuda.mem_get_info()[0] * FILLED
    num_layers = whole
    while num_layers > 1 and read_bytes(CONFIGS[name], spec_of(name, num_layers), 1 << 20) > free:
        num_layers -= 1
    return spec_of(name, num_layers), "" if num_layers == whole else f", {num_layers} of {whole} layers"


def engine(name: str, device: Device, section: Section) -> None:
    """Measure offline and online rates, their share of the bandwidth's limit, and how long the device is idle."""
    ours = _started(name, "", _spec(device, name), device, section, MAX_MODEL_LEN)
    rate = 0.0
    for workload, jobs in _workloads(device).items():
        found = ours.driver.offline(jobs)
        floor_s = floor_bytes(jobs, ours.weight_bytes, ours.kv_bytes_per_token) / device.bytes_per_s
        num_tokens = output_tokens(jobs)
        section.add(f"offline, {workload}", "tokens/s", num_tokens / found.seconds, limit=num_tokens / floor_s)
        section.add(f"offline, {workload}, CPU time of a step", "ms", 1000 * found.cpu_s / found.num_steps)
        if workload == "128/128":
            rate = len(jobs) / found.seconds
    _idle(device, section, ours)
    _mixed(device, section, ours)
    _predicted(device, section, ours)
    _online(device, section, ours, rate)


def start(name: str, device: Device, section: Section) -> None:
    """Measure the start again, with the kernels that the engine's section left in Triton's cache."""
    _started(name, ", kernels compiled before", _spec(device, name), device, section, MAX_MODEL_LEN)


def _problem_of(part: Callable[[], None]) -> str | None:
    """Run a part; return its error or None, so that later parts run nevertheless."""
    try:
        part()
    except Exception as problem:
        traceback.print_exc()
        return reported(problem, 600)
    return None


def _started(name: str, words: str, spec: ModelSpec, device: Device, section: Section, max_model_len: int) -> Engine:
    """Start an engine and report the times since the process began; measuring the limits is excluded."""
    imports_s = _process_age_s()
    limits(device, section)
    ours = Engine(device, spec, max_model_len=max_model_len)
    parts = {"imports": imports_s, "weights": ours.load_s, "compiling and CUDA graphs": ours.compile_s}
    for part, seconds in parts.items():
        section.add(f"start, {part}{words}", "s", seconds)
    section.add(f"start to ready{words}", "s", sum(parts.values()))
    return ours


def _process_age_s() -> float:
    """Return the process's age by the kernel's clock, so that the interpreter's own start counts."""
    behind_the_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began_s = int(behind_the_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s


def _idle(device: Device, section: Section, ours: Engine) -> None:
    """Measure the idle share; a profiler that may not access the device costs only the row."""
    num_requests, num_steps = (2, 2) if device.tiny else (MAX_SEQS, PROFILED_STEPS)
    shape = f"{num_requests} decodes"
    jobs = [Job(job.prompt_token_ids, 3 * num_steps) for job in _short(device, num_requests)]
    try:
        found = ours.driver.profile(jobs, num_steps)
    except (RuntimeError, ValueError) as problem:
        section.add(shape, "% of a profiler's trace idle", None, error=reported(problem))
        return
    section.add(shape, "ms", 1000 * found.step_s)
    section.add(shape, "% of a profiler's trace idle", 100 * found.idle)


def _mixed(device: Device, section: Section, ours: Engine) -> None:
    """Measure mixed steps; steps larger than any CUDA graph are launched kernel by kernel in both columns."""
    num_steps = 2 if device.tiny else MIXED_STEPS
    for num_decodes, num_tokens in ((1, 5),) if device.tiny else MIXED:
        jobs = [Job(job.prompt_token_ids, 2 * num_steps + 8) for job in _short(device, num_decodes)]
        prompts = fixed(num_steps, num_tokens, 1, TINY.vocab_size)
        recorded_ms = 1000 * ours.driver.beside(jobs, prompts)
        with ours.launched_piece_by_piece():
            apart_ms = 1000 * ours.driver.beside(jobs, prompts)
        shape = f"step of {num_decodes} decodes and {num_tokens} tokens of a prompt"
        section.add(shape, "ms", recorded_ms, peer_name="launched kernel by kernel", peer=apart_ms)


def _predicted(device: Device, section: Section, ours: Engine) -> None:
    """Measure text that is known before, but for each ninth token, and predictions that are all wrong, beside the same
    answers without predictions."""
    for num_requests in (2,) if device.tiny else PREDICTED:
        jobs = _short(device, num_requests)
        answers = ours.driver.answers(jobs, 0.0)
        wrong = [[(each + 1) % TINY.vocab_size for each in answer] for answer in answers]
        nearly = [
            [other if place % 9 == 8 else own for place, (own, other) in enumerate(zip(*both, strict=True))]
            for both in zip(answers, wrong, strict=True)
        ]
        nothing: list[list[int]] = [[]] * num_requests
        rates = [
            output_tokens(jobs) / ours.driver.offline(jobs, predicted).seconds for predicted in (nothing, nearly, wrong)
        ]
        for what, rate in zip(("predicted but for each ninth token", "predicted wrongly"), rates[1:], strict=True):
            name = f"{num_requests} at once, {what}"
            section.add(name, "tokens/s", rate, peer_name="without predictions", peer=rates[0])


def _online(device: Device, section: Section, ours: Engine, offline_rate: float) -> None:
    for share in RATES[:1] if device.tiny else RATES:
        rate = 1000.0 if device.tiny else offline_rate * share
        num_requests = 2 if device.tiny else max(8, int(rate * ONLINE_S))
        found = ours.driver.online(_short(device, num_requests), rate)
        for unit, value in _percentiles_ms(found).items():
            section.add(f"online, 128/128, {100 * share:.0f} % of the offline rate", unit, value)


def _percentiles_ms(found: Online) -> dict[str, float]:
    times = {"ms to the first token": found.ttft_s, "ms a token": found.tpot_s}
    return {
        f"{what}, {name}": 1000 * _at(each, p)
        for what, each in times.items()
        for name, p in (("p50", 0.5), ("p99", 0.99))
    }


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _workloads(device: Device) -> dict[str, list[Job]]:
    if device.tiny:
        short = _short(device, 2)
        return {"100-1024": short, "128/128": short}
    return {"100-1024": nano(), "128/128": _short(device, 1024)}


def _short(device: Device, num_requests: int) -> list[Job]:
    return fixed(num_requests, 5, 2, TINY.vocab_size) if device.tiny else fixed(num_requests, 128, 128)


def _prompts(device: Device, num_requests: int, length: int) -> list[Job]:
    return fixed(num_requests, min(length, 9), 2, 64) if device.tiny else fixed(num_requests, length, 2)


def _spec(device: Device, name: str) -> ModelSpec:
    return TINY if device.tiny else spec_of(name)
