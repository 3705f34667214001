"""The sections of a run in the order in which they run: the most valuable first. A later feature is one more entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import sections
from comparing import offline, online
from measuring import Device
from own_tests import run_tests
from rows import ENGINE, KERNELS, Section

Run = Callable[[Device, Section], None]
SERVER = (*ENGINE, "protocol/pagemill_protocol")
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
    "tests": Entry(partial(run_tests, limit_s=TESTS_S - 5), TESTS_S, SERVER),
    "kernels": Entry(sections.kernels, 90, KERNELS),
    "attention": Entry(sections.attention, 90, KERNELS),
    "steps-llama-3.1-8b": Entry(partial(sections.steps, "llama-3.1-8b"), 100),
    "steps-qwen3-30b-a3b": Entry(partial(sections.steps, "qwen3-30b-a3b"), 150),
    "steps-gpt-oss-20b": Entry(partial(sections.steps, "gpt-oss-20b"), 150),
    "serve-qwen3-0.6b": Entry(partial(online, "qwen3-0.6b"), 240, SERVER, least_s=40),
    "offline-qwen3-0.6b": Entry(partial(offline, "qwen3-0.6b"), 240, SERVER, least_s=60),
    "offline-llama-3.1-8b": Entry(partial(offline, "llama-3.1-8b"), 300, SERVER, least_s=90),
    "engine-qwen3-0.6b": Entry(partial(sections.engine, "qwen3-0.6b"), 120),
    "start-qwen3-0.6b": Entry(partial(sections.start, "qwen3-0.6b"), 60),
    "engine-llama-3.1-8b": Entry(partial(sections.engine, "llama-3.1-8b"), 150),
    "engine-llama-3.2-1b": Entry(partial(sections.engine, "llama-3.2-1b"), 120),
}
