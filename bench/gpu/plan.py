"""The sections of a run in the order in which they run: the most valuable first. A later feature is one more entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import sections
from comparing import offline, online
from measuring import Device
from own_tests import ENGINE_FILES, KERNEL_FILES, run_tests
from rows import ENGINE, KERNELS, SERVER, Section

Run = Callable[[Device, Section], None]
TESTS_S = 150.0


@dataclass(frozen=True)
class Entry:
    run: Run
    budget_s: float
    """Seconds after which the section is ended; its rows stay."""
    sources: tuple[str, ...] = ENGINE
    """The folders whose code it measures: a row of the same code need not be measured again."""
    least_s: float = 20.0
    """With less time left, the section is not started."""


SECTIONS: dict[str, Entry] = {
    "smoke": Entry(sections.smoke, 100),
    "tests-engine": Entry(partial(run_tests, ENGINE_FILES, TESTS_S - 5), TESTS_S),
    "tests-kernels": Entry(partial(run_tests, KERNEL_FILES, TESTS_S - 5), TESTS_S, KERNELS),
    "serve-qwen3-0.6b": Entry(partial(online, "qwen3-0.6b"), 240, SERVER, least_s=40),
    "offline-llama-3.1-8b": Entry(partial(offline, "llama-3.1-8b"), 300, SERVER, least_s=90),
    "steps-llama-3.1-8b": Entry(partial(sections.steps, "llama-3.1-8b"), 100),
    "steps-gpt-oss-20b": Entry(partial(sections.steps, "gpt-oss-20b"), 150),
    "steps-qwen3-30b-a3b": Entry(partial(sections.steps, "qwen3-30b-a3b"), 150, least_s=40),
    "steps-qwen3.5-9b": Entry(partial(sections.steps, "qwen3.5-9b"), 120, least_s=40),
    "steps-qwen3.6-35b-a3b": Entry(partial(sections.steps, "qwen3.6-35b-a3b"), 180, least_s=60),
    "attention": Entry(sections.attention, 90, KERNELS),
    "kernels": Entry(sections.kernels, 90, KERNELS),
    "offline-qwen3-0.6b": Entry(partial(offline, "qwen3-0.6b"), 240, SERVER, least_s=60),
    "engine-qwen3-0.6b": Entry(partial(sections.engine, "qwen3-0.6b"), 120),
    "start-qwen3-0.6b": Entry(partial(sections.start, "qwen3-0.6b"), 60),
    "engine-llama-3.1-8b": Entry(partial(sections.engine, "llama-3.1-8b"), 150),
    "engine-llama-3.2-1b": Entry(partial(sections.engine, "llama-3.2-1b"), 120),
}
