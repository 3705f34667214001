"""The engine process: loads the model, generates a first token, then steps until it is shut down.

`ipc.process` starts it as `python -m pagemill_engine.loop.process FOLDER [MODULE ...]`. It imports the modules while
its settings arrive, then digests the weights in the background. It blocks on its inbox when there is nothing to do, and
sends a report at least every second, so that silence means a long step or a fault; heartbeats show that the process
runs. `loop.core` runs the steps.
"""

from __future__ import annotations

import gc
import importlib
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.link import ParentLink
from pagemill_engine.ipc.messages import (
    Abort,
    AddRequest,
    Awake,
    Fatal,
    ForgetAdapter,
    LoadAdapter,
    LoadProgress,
    RaiseAllowance,
    Ready,
    Shutdown,
    Sleep,
    Slept,
    StepOutputs,
    ToEngine,
    TokensOut,
    Wake,
)
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.refusals import refusals
from pagemill_engine.loop.warmup import Calibration, SelfTestError, probe, self_test
from pagemill_execution.runners.errors import DeviceLostError
from pagemill_execution.runners.sleep import SleepError
from pagemill_execution.starting import factory
from pagemill_execution.weights.early_digest import EarlyDigest
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.gpu.driver import find_driver
from pagemill_kernels.huge_pages import collapse_when_idle
from pagemill_kernels.registry import has_torch
from pagemill_protocol.errors import PagemillError, internal_error, unavailable
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.source_errors import SourceError
from pagemill_servers.process import logs
from pagemill_servers.process.malloc import keep_trimmed

if TYPE_CHECKING:
    from pagemill_engine.loop.adapter_requests import AdapterRequests

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
PROBE_AFTER_FAILED_STEPS = 8
"""Failed steps in a row after which either the requests or the device are at fault; a probe decides."""


class EngineFault(RuntimeError):
    """The process cannot continue. It is reported as `Fatal`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class EngineLoop:
    """Feeds one `EngineCore` from a link until `Shutdown`."""

    def __init__(self, core: EngineCore, link: ParentLink, calibration: Calibration | None = None) -> None:
        """Create the loop. `calibration`: continues while there are no requests."""
        self._core = core
        self._link = link
        self._calibration = calibration
        self._refused: list[TokensOut] = []
        self._num_added = 0
        self._stopped = False
        self._idle_checked = True
        self._sleep_requested = False
        """Whether sleep was requested; the engine sleeps as soon as nothing runs."""
        self._sleeps = False

    def run(self) -> None:
        while not self._stopped:
            self._take_messages()
            if self._refused:
                self._send(StepOutputs(outputs=self._refused, load=self._core.load()))
                self._refused = []
            if self._core.has_work:
                self._send(self._core.step())
                self._idle_checked = False
                self._check_device()
            if self._sleep_requested and not self._core.has_work:
                self._sleep()

    def _take_messages(self) -> None:
        """Handle all messages that have arrived. Waits only if there is nothing else to do."""
        message = self._link.receive(0 if self._core.has_work else HEARTBEAT_S)
        if message is None and not self._core.has_work:
            self._idle()
        while message is not None:
            self._handle(message)
            message = self._link.receive(0)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest(request):
                self._add(request)
            case Abort(request_id, choice):
                self._abort(request_id, choice)
            case RaiseAllowance(request_id, allowance):
                self._core.raise_allowance(request_id, allowance)
            case LoadAdapter():
                self._adapters.begin(message)
            case ForgetAdapter(digest):
                self._adapters.store.forget(digest)
            case Sleep():
                self._sleep_requested = True
            case Wake():
                self._wake()
            case Shutdown():
                self._stopped = True

    def _add(self, request: GenerateRequest) -> None:
        self._num_added += 1
        try:
            if self._sleeps:
                raise unavailable("The engine is asleep. Wake it up first.", retry_after_s=1, code="not_ready")
            self._core.add(request)
        except PagemillError as error:
            self._refused += refusals(request, error)
        except Exception:
            logger.exception("request %s could not be queued", request.request_id)
            self._abort(request.request_id)
            self._core.check_integrity()
            self._refused += refusals(request, internal_error())

    def _abort(self, request_id: str, choice: int | None = None) -> None:
        try:
            self._core.abort(request_id, choice)
        except Exception:
            logger.exception("request %s could not be aborted", request_id)
            self._core.check_integrity()

    def _sleep(self) -> None:
        self._sleep_requested = False
        if self._sleeps:
            self._link.send(Slept())
            return
        try:
            released_bytes, report = release_memory(self._core)
        except SleepError as error:
            self._link.send(Slept(fault=str(error)))
            return
        self._sleeps = True
        self._link.send(report)
        self._link.send(Slept(released_bytes))

    def _wake(self) -> None:
        self._sleep_requested = False
        if not self._sleeps:
            self._link.send(Awake())
            return
        started_s = time.monotonic()
        try:
            wake_up(self._core)
        except Exception as error:
            raise EngineFault("WakeFailed", f"The engine cannot wake up and must be replaced: {error}") from error
        self._sleeps = False
        self._link.send(Awake(time.monotonic() - started_s))

    def _idle(self) -> None:
        self._core.runner.info.check()
        if not self._idle_checked:
            self._core.check_integrity()
            self._idle_checked = True
        learned = self._calibration is not None and not self._sleeps and self._calibration.measure_next()
        step_time = self._core.step_time.params() if learned else None
        self._send(StepOutputs(load=self._core.load(), step_time=step_time, ranks=self._core.runner.info.ranks()))

    @property
    def _adapters(self) -> AdapterRequests:
        adapters = self._core.adapters
        assert adapters is not None, "servers load adapters only where they are served"
        return adapters

    def _send(self, report: StepOutputs) -> None:
        adapters = self._core.adapters
        if adapters is not None:
            report = msgspec.structs.replace(report, load=adapters.counted(report.load), adapters=adapters.take_use())
            for answer in adapters.take_answers():
                self._link.send(answer)
        ranks = self._core.runner.info.ranks() if report.step_time is not None else report.ranks
        self._link.send(msgspec.structs.replace(report, num_added=self._num_added, ranks=ranks))

    def _check_device(self) -> None:
        failures = self._core.num_failed_steps_in_a_row
        if failures == 0 or failures % PROBE_AFTER_FAILED_STEPS:
            return
        try:
            probe(self._core)
        except Exception as error:
            raise EngineFault(
                "RunnerBroken",
                f"{failures} steps in a row failed and so did a probe of one token ({type(error).__name__}). "
                "The device or its driver needs a restart; see the engine's log.",
            ) from error


def start_core(
    config: EngineConfig, progress: Callable[[str, str], None], early_digest: EarlyDigest | None = None
) -> tuple[EngineCore, Calibration]:
    """Load the model and generate a first token. Raises what the runner factory raises, or `SelfTestError`."""
    core = EngineCore(config, factory.create_runner(config, progress, early_digest))
    progress("first_token", "generating a first token")
    self_test(core)
    progress("warming", "measuring step times")
    calibration = Calibration(core)
    calibration.begin()
    return core, calibration


TRIM_EVERY_S = 15.0
"""Seconds between returns of freed memory: what a step allocates on the CPU is needed again by the next ones."""


def serve(config: EngineConfig, link: ParentLink, early_digest: EarlyDigest | None = None) -> None:
    """Load the model, report ready, and run the loop until `Shutdown`."""
    started_s, clock = time.monotonic(), StartClock()

    def progress(phase: str, detail: str) -> None:
        clock.progress(phase)
        link.send(LoadProgress(phase, detail, time.monotonic() - started_s))

    # Imports and loading create many long-lived objects and little garbage: 450 collections take 0.3 s of 4.
    gc.disable()
    try:
        core, calibration = start_core(config, progress, early_digest)
        # Objects that are alive now stay alive: collections can skip them.
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
    link.send(_ready(core, time.monotonic() - started_s, clock.seconds()))
    collapse_when_idle()
    keep_trimmed(TRIM_EVERY_S)
    link.start_heartbeat(lambda: core.expected_step_ms)
    try:
        EngineLoop(core, link, calibration).run()
    finally:
        core.runner.close()


def _ready(core: EngineCore, load_s: float, start_s: dict[str, float]) -> Ready:
    info = core.runner.info
    return Ready(
        limits=core.scheduler.limits,
        weight_bytes=info.weight_bytes,
        kv_bytes_per_token=info.kv_bytes_per_token,
        compute=info.compute,
        device=info.device,
        load_s=load_s,
        start_s=start_s,
        load=core.load(),
        memory=info.memory,
    )


def fatal_of(error: Exception) -> Fatal:
    """Return the report of a fatal error, with the error's own `reason` if it has one."""
    if isinstance(error, SelfTestError) and "OutOfMemory" in str(error):
        remedy = "Lower maxNumSeqs, maxNumBatchedTokens or kvCacheMemory."
        return Fatal("StepTooLarge", f"The device ran out of memory at the first token. {remedy}")
    if isinstance(error, SelfTestError):
        return Fatal("SelfTestFailed", f"The model loaded and could not compute a first request: {error}.")
    if isinstance(error, MemoryError):
        return Fatal("OutOfMemory", "The engine ran out of memory. Lower kvCacheMemory or give it more memory.")
    if isinstance(error, DeviceLostError):
        return Fatal(error.reason, str(error))
    if isinstance(error, EngineFault | LoadError | SourceError):
        return Fatal(error.reason, error.message)
    return Fatal("EngineFailed", f"{type(error).__name__}: {error}")


def preimport_modules(modules: list[str]) -> None:
    """Import the modules, and torch if there is a GPU, on which torch is likely to compute."""
    for module in modules:
        importlib.import_module(module)
    if find_driver() is not None and has_torch():
        importlib.import_module("torch")


def main(argv: list[str]) -> int:
    if not argv:
        sys.stderr.write("usage: python -m pagemill_engine.loop.process FOLDER [MODULE ...]\n")
        return 2
    logs.configure(logging.WARNING, process="engine")
    # Ctrl-C reaches the whole process group; the parent decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = ParentLink(Path(argv[0]))
    link.start()
    gc.disable()
    try:
        modules = argv[1:]
        early_digest = None
        if modules:
            early_digest = EarlyDigest(lambda: factory.find_model(link.settings()))
            preimport_modules(modules)
        # Imports create 300,000 long-lived objects and hardly any garbage: no collection is needed before ready.
        gc.freeze()
        serve(link.settings(), link, early_digest)
    except Exception as error:
        fatal = fatal_of(error)
        if fatal.reason == "EngineFailed":
            logger.exception("the engine process ends because of an internal error")
        link.write_fatal(fatal)
        return 1
    finally:
        link.close()
    return 0


def release_memory(core: EngineCore) -> tuple[int, StepOutputs]:
    """Free the runner's memory. Call this when there is no work left.

    Returns the number of freed bytes, and the outputs that report the emptied prefix cache. Raises
    `pagemill_execution.runners.sleep.SleepError` if the runner cannot sleep; nothing has changed then.
    """
    num_bytes = core.runner.sleep()
    core.scheduler.kv.reset_prefix_cache()
    return num_bytes, core.step()


def wake_up(core: EngineCore) -> None:
    """Allocate memory again and generate a first token. Raises what allocating raises, or `SelfTestError`."""
    core.runner.wake()
    self_test(core)


LOAD, WARM, FIRST_TOKEN = "load", "warm", "first_token"
_PHASE_OF_PROGRESS = {"warming": WARM, "first_token": FIRST_TOKEN}
"""Phases of progress reports. All other reports belong to the load phase."""


class StartClock:
    """Measures the phases of a start, which the state stream publishes. Times of a repeated phase are added."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase, self._since_s = LOAD, clock()
        self._seconds: dict[str, float] = {}

    def progress(self, phase: str) -> None:
        """Record a progress report of the start (`LoadProgress`)."""
        self._enter(_PHASE_OF_PROGRESS.get(phase, LOAD))

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each phase until now."""
        self._enter(self._phase)
        return {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}

    def _enter(self, phase: str) -> None:
        now_s = self._clock()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now_s - self._since_s
        self._phase, self._since_s = phase, now_s


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
