"""Drives requests through an engine's loop: all at once, as they arrive, and under a profiler of the device."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from measuring import Device
from torch.profiler import ProfilerActivity
from workloads import Job

from pagemill_engine.loop.core import EngineCore
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

TEMPERATURE = 0.6


class Offline(NamedTuple):
    seconds: float
    num_steps: int
    cpu_s: float
    """CPU seconds of this thread, without the time in which it waited for the device."""
    num_preemptions: int


class Profile(NamedTuple):
    """Pure decode steps under a profiler of the device."""

    idle: float
    """Share of the time in which the device is idle."""
    step_s: float
    """Seconds per step without the profiler."""
    kernels: dict[str, tuple[float, float]]
    """Launches and seconds per step by the name of what ran, the longest first."""


class Online(NamedTuple):
    """Sorted times in seconds."""

    ttft_s: list[float]
    tpot_s: list[float]


class Driver:
    """Drives one engine with one kind of traffic at a time."""

    def __init__(self, device: Device, core: EngineCore) -> None:
        self._device, self._core = device, core
        self._waited = _WaitedApart(core.runner) if core.runner.info.overlaps else None
        self._num_requests = 0

    def offline(self, jobs: list[Job], predicted: list[list[int]] | None = None) -> Offline:
        """Run all requests at once, to the last token. `predicted`: what their clients predict; these are greedy."""
        for number, job in enumerate(jobs):
            if predicted is None:
                self._add(job)
            else:
                self._add(job, 0.0, predicted=predicted[number])
        preempted, waited_s = self._core.scheduler.num_preemptions, self._waited_cpu_s
        begin_s, begin_cpu_s, num_steps = time.perf_counter(), time.thread_time(), 0
        while self._core.has_work:
            self._step()
            num_steps += 1
        cpu_s = time.thread_time() - begin_cpu_s - (self._waited_cpu_s - waited_s)
        self._device.synchronize()
        seconds = time.perf_counter() - begin_s
        return Offline(seconds, num_steps, cpu_s, self._core.scheduler.num_preemptions - preempted)

    def online(self, jobs: list[Job], requests_per_s: float) -> Online:
        """Run requests that arrive at random, independently of the engine; times count from their arrival."""
        draw = random.Random(2)
        arrivals, at_s = [], 0.0
        for _ in jobs:
            at_s += draw.expovariate(requests_per_s)
            arrivals.append(at_s)
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        names: list[str] = []
        begin_s = time.perf_counter()
        while len(names) < len(jobs) or self._core.has_work:
            now_s = time.perf_counter() - begin_s
            while len(names) < len(jobs) and arrivals[len(names)] <= now_s:
                names.append(self._add(jobs[len(names)]))
            if not self._core.has_work:
                time.sleep(arrivals[len(names)] - now_s)
                continue
            for name in self._step():
                reported_s = time.perf_counter() - begin_s
                first.setdefault(name, reported_s)
                last[name] = reported_s
        return Online(
            sorted(first[name] - arrival for name, arrival in zip(names, arrivals, strict=True)),
            sorted(
                (last[name] - first[name]) / max(1, job.num_output_tokens - 1)
                for name, job in zip(names, jobs, strict=True)
            ),
        )

    def answers(self, jobs: list[Job], temperature: float) -> list[list[int]]:
        """Return the tokens of each request."""
        names = [self._add(job, temperature, seed) for seed, job in enumerate(jobs)]
        tokens: dict[str, list[int]] = {name: [] for name in names}
        while self._core.has_work:
            for name, token_ids in self._step().items():
                tokens[name] += token_ids
        return [tokens[name] for name in names]

    def beside(self, jobs: list[Job], prompts: list[Job]) -> float:
        """Return the seconds of a step in which all jobs decode beside one of the prompts, unchunked.

        The jobs' answers are longer than twice as many steps; those of the prompts are one token.
        """
        names = [self._add(job) for job in jobs]
        self._start()
        self._mixed(prompts)
        begin_s = time.perf_counter()
        self._mixed(prompts)
        step_s = (time.perf_counter() - begin_s) / len(prompts)
        for name in names:
            self._core.abort(name)
        while self._core.has_work:
            self._core.step()
        return step_s

    def decode_s(self, jobs: list[Job], num_steps: int) -> float:
        """Return the seconds of a step in which all jobs decode. Their answers are longer than twice as many steps."""
        names = [self._add(job) for job in jobs]
        self._start()
        self._steps(num_steps)
        begin_s = time.perf_counter()
        self._steps(num_steps)
        step_s = (time.perf_counter() - begin_s) / num_steps
        for name in names:
            self._core.abort(name)
        while self._core.has_work:
            self._core.step()
        return step_s

    def profile(self, jobs: list[Job], num_steps: int) -> Profile:
        """Profile pure decodes. The jobs' answers are longer than twice as many steps."""
        for job in jobs:
            self._add(job)
        self._start()
        begin_s = time.perf_counter()
        self._steps(num_steps)
        step_s = (time.perf_counter() - begin_s) / num_steps
        activity = ProfilerActivity.CUDA if self._device.on_gpu else ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity]) as seen:
            self._steps(num_steps)
        while self._core.has_work:
            self._step()
        events: Any = seen.events()
        wanted = [each for each in events if each.device_type.name == activity.name]
        ranges = [(each.time_range.start, each.time_range.end) for each in wanted]
        totals: dict[str, tuple[float, float]] = {}
        for each in wanted:
            launches, seconds = totals.get(each.name, (0.0, 0.0))
            taken_s = each.time_range.elapsed_us() / 1e6
            totals[each.name] = launches + 1 / num_steps, seconds + taken_s / num_steps
        longest = dict(sorted(totals.items(), key=lambda item: -item[1][1]))
        return Profile(idle_share(ranges), step_s, longest)

    @property
    def _waited_cpu_s(self) -> float:
        return self._waited.cpu_s if self._waited is not None else 0.0

    def _start(self) -> None:
        """Step until all requests decode."""
        while self._core.load().num_requests_waiting or self._core.load().num_tokens_waiting:
            self._step()
        self._device.synchronize()

    def _mixed(self, prompts: list[Job]) -> None:
        for prompt in prompts:
            self._add(prompt)
            self._step()
        self._device.synchronize()

    def _steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()
        self._device.synchronize()

    def _step(self) -> dict[str, list[int]]:
        """Run a step; return the tokens of each request. Raise if a request fails."""
        outputs = self._core.step().outputs
        failed = [output.error for output in outputs if output.error is not None]
        if failed:
            raise AssertionError(failed[0])
        return {output.request_id: output.token_ids for output in outputs}

    def _add(
        self, job: Job, temperature: float = TEMPERATURE, seed: int | None = None, predicted: Iterable[int] = ()
    ) -> str:
        self._num_requests += 1
        name = str(self._num_requests)
        sampling = SamplingParams(
            temperature=temperature,
            seed=self._num_requests if seed is None else seed,
            max_tokens=job.num_output_tokens,
            ignore_eos=True,
        )
        self._core.add(
            GenerateRequest(
                request_id=name,
                model="random",
                prompt_token_ids=job.prompt_token_ids,
                sampling=sampling,
                predicted_token_ids=[*predicted],
            )
        )
        return name


def idle_share(ranges: Iterable[tuple[float, float]]) -> float:
    """Return the share of the time, from the first begin to the last end, in which no range lies."""
    ordered = sorted(ranges)
    if not ordered:
        raise ValueError("the profiler saw nothing run on the device")
    busy, begin, end = 0.0, *ordered[0]
    for start, stop in ordered[1:]:
        if start > end:
            busy, begin = busy + end - begin, start
        end = max(end, stop)
    whole = end - ordered[0][0]
    return 1 - (busy + end - begin) / whole if whole else 0.0


class _WaitedApart:
    """Measures the CPU time that a runner's `wait` spends until the device is done: waiting for an event keeps the
    thread busy. The runner's own work on the result is not included. Only for a runner that overlaps: others have
    waited when `launch` returns.
    """

    def __init__(self, runner: Any) -> None:
        self.cpu_s = 0.0
        self._marks: dict[int, Any] = {}
        self._launch, self._wait = runner.launch, runner.wait
        runner.launch, runner.wait = self._launched, self._read

    def _launched(self, plan: Any) -> Any:
        handle = self._launch(plan)
        self._marks[id(handle)] = torch.cuda.current_stream().record_event()
        return handle

    def _read(self, handle: Any) -> Any:
        mark = self._marks.pop(id(handle), None)
        if mark is not None and handle.error is None:
            begin_s = time.thread_time()
            mark.synchronize()
            self.cpu_s += time.thread_time() - begin_s
        return self._wait(handle)
