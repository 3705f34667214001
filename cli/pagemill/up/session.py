"""One run of `pagemill up`: starts everything, shows what it waits for, sends the first question, and serves until
stopped.

`loading` makes the plans, the local backend runs them, and `screen` shows what happens. The backend is always stopped
at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from pagemill.up.answer import QUESTION, AnswerError, NoChatError, ask
from pagemill.up.dashboards import Dashboards
from pagemill.up.loading import Loaded, describe_changes, load_files
from pagemill.up.screen import Screen, report_errors
from pagemill_operator.backends.base import BackendError, Event
from pagemill_operator.backends.local import LocalBackend, LocalSettings
from pagemill_operator.backends.local.load import MachineLoad
from pagemill_operator.plan import Plan
from pagemill_operator.status.conditions import Finding, find_conditions
from pagemill_servers.auth import hash_key
from pagemill_servers.keys.file import KeysFileError, check_keys_file
from pagemill_servers.secrets.secret_file import CHECK_INTERVAL_S

logger = logging.getLogger("pagemill.up")

MAX_FIRST_CRASHES = 3
"""After this many crashes of a process that was never ready, `pagemill up` gives up."""


@dataclass(frozen=True)
class UpRequest:
    files: Sequence[Path]
    keep: bool
    """Whether to keep serving if no terminal is attached."""
    started_at_s: float
    """The start of the command, by `time.time()`."""
    settings: LocalSettings
    dashboards: bool = False
    """Whether to run Prometheus and Grafana."""


class GivenUp(Exception):
    """A process cannot become ready; the message names it and the cause."""


async def run_up(request: UpRequest, loaded: list[Loaded], screen: Screen) -> int:
    """Run the session; return the exit code: 0 after serving, 1 after an error, 130 if interrupted before serving."""
    session = Session(request, loaded, screen)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if stop.is_set():
            session.kill()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under `nohup`, SIGHUP is ignored; a handler would undo that.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, interrupt)
    work = asyncio.create_task(session.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return 0 if session.served else 130
        await work
        return 0
    except (BackendError, GivenUp, AnswerError) as error:
        report_errors([str(error)])
        return 1
    except BrokenPipeError:
        return 1  # the output is closed (`| head`)
    except Exception as error:
        logger.debug("pagemill up failed", exc_info=True)
        words = str(error).splitlines() or ["no further explanation"]
        report_errors([f"unexpected {type(error).__name__}: {words[0]}; everything was stopped, start it again"])
        return 1
    finally:
        await session.end(work, stopping)


class Session:
    def __init__(self, request: UpRequest, loaded: list[Loaded], screen: Screen) -> None:
        self.served = False
        """Whether the first answer was complete."""
        self._request = request
        self._loaded = loaded
        self._screen = screen
        self._news = asyncio.Event()
        self._own_key = f"pm-{secrets.token_urlsafe(24)}" if request.settings.api_keys_file else ""
        settings = request.settings
        if self._own_key:
            settings = replace(settings, api_keys=(*settings.api_keys, hash_key(self._own_key)))
        self._backend = LocalBackend(settings, on_event=self._show_event, on_change=self._news.set)
        self._dashboards = Dashboards(self._backend, settings, screen) if request.dashboards else None

    async def run(self) -> None:
        """Start everything and serve until cancelled; without terminal and `keep`, return once all are ready."""
        for line in notes_of(self._loaded):
            self._screen.line(line)
        await self._backend.start()
        if self._dashboards is not None:
            await self._dashboards.start()
        await self._backend.apply(self._plans)
        # The first ready replica answers while the others are loading.
        await self._wait_for("Serving", [self._first_plan])
        self._show_urls()
        await self._first_answer()
        self.served = True
        await self._wait_for("Ready", self._plans)
        await self._wait_for_fields()
        if not self._screen.interactive and not self._request.keep:
            return
        await self._serve()

    async def end(self, work: asyncio.Task[None], stopping: asyncio.Task[bool]) -> None:
        """Stop all processes in order, even if the terminal is closed."""
        for task in (work, stopping):
            task.cancel()
        await asyncio.gather(work, stopping, return_exceptions=True)
        with contextlib.suppress(OSError):
            self._screen.status("stopping the gateway, then the engines; press Ctrl-C again to kill them")
        if self._dashboards is not None:
            await self._dashboards.stop()
        await self._backend.stop()
        with contextlib.suppress(OSError):
            self._screen.status("")
            self._screen.line("stopped")

    def kill(self) -> None:
        """Kill all processes at once, after a second Ctrl-C."""
        self._backend.kill()

    @property
    def _plans(self) -> list[Plan]:
        return [item.plan for item in self._loaded]

    @property
    def _first_plan(self) -> Plan:
        """The plan whose model gets the first question: the first one with replicas, otherwise the first one."""
        return next((plan for plan in self._plans if plan.replicas), self._plans[0])

    def _show_event(self, event: Event) -> None:
        line = f"{event.subject}: {event.message} ({event.since_start_s:.1f} s)"
        # The supervisor calls this; it must not fail because the output is closed (`| head`).
        with contextlib.suppress(OSError):
            if event.warning:
                self._screen.warn(line)
            else:
                self._screen.line(line)

    async def _wait_for(self, condition: str, plans: Sequence[Plan]) -> None:
        """Wait until all plans have the condition; the status line shows what they wait for. Raises `GivenUp`."""
        while True:
            self._news.clear()
            findings = [self._finding(plan, condition) for plan in plans]
            if all(finding.status == "True" for finding in findings):
                return
            self._give_up_if_hopeless()
            waits = [f"{plan.name}: {self._finding(plan, 'Ready').message}" for plan in plans]
            self._screen.status("waiting for " + "; ".join(waits))
            await self._news.wait()

    async def _wait_for_fields(self) -> None:
        """Wait until the engines have reported the fields that have no effect with the kind of their model."""
        while any(self._finding(plan, "FieldsSupported").status == "Unknown" for plan in self._plans):
            self._news.clear()
            self._give_up_if_hopeless()
            await self._news.wait()

    def _finding(self, plan: Plan, condition: str) -> Finding:
        observation = self._backend.observe(plan.key)
        wanted = observation.plan.replicas if observation.plan is not None else plan.replicas
        if wanted == 0 and observation.gateway_ready:
            return Finding(condition, "True", "ScaledToZero", "there are no replicas to wait for")
        return {finding.type: finding for finding in find_conditions(observation)}[condition]

    def _give_up_if_hopeless(self) -> None:
        processes = [self._backend.gateway.supervisor]
        processes += [process for plan in self._plans for process in self._backend.supervisors(plan.key)]
        for process in processes:
            if process.phase != "crashed" or process.was_ready:
                continue
            if process.is_permanent or process.num_crashes >= MAX_FIRST_CRASHES:
                raise GivenUp(f"{process.name}: {process.reason}: {process.message}")

    def _show_urls(self) -> None:
        base_url, control_url = self._backend.base_url, self._backend.gateway.control_url
        names = [name for plan in self._plans for name in plan.names]
        key = " -H 'Authorization: Bearer KEY'" if self._own_key else ""
        body = f'{{"model": "{self._first_plan.model_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        self._screen.status("")
        self._screen.line("")
        self._screen.line(f"OpenAI base URL   {base_url}/v1")
        self._screen.line(f"Live page         {base_url}/ui")
        self._screen.line(f"Models            {', '.join(dict.fromkeys(names))}")
        if control_url:
            self._screen.line(f"Status, metrics   {control_url}/status  {control_url}/metrics")
            self._screen.line(f"Control token     {self._backend.gateway.token_path}")
        kept = self._request.settings.logs_folder
        self._screen.line(f"Logs              {self._backend.folder}/*.log{f'; at the end in {kept}' if kept else ''}")
        self._screen.line(
            f"Try               curl {base_url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\"
        )
        self._screen.line(f"                  -d '{body}'")
        self._screen.line("")

    async def _first_answer(self) -> None:
        if not self._first_plan.replicas:
            return
        model = self._first_plan.model_name
        self._screen.line(f"> {QUESTION}")
        try:
            answer = await ask(self._backend.base_url, model, self._screen.stream, api_key=self._own_key)
        except NoChatError as error:
            self._screen.line(f"no answer is shown: {error}")
            return
        since_start_s = answer.first_token_at_s - self._request.started_at_s
        self._screen.line("")
        self._screen.line(
            f"first token after {answer.ttft_s * 1000:.0f} ms, answer in {answer.total_s:.1f} s; "
            f"{since_start_s:.1f} s from start to first token"
        )

    async def _serve(self) -> None:
        """Apply edits of the files, and show the load on a terminal, until cancelled."""
        self._screen.line("edit the file to change what runs; Ctrl-C stops everything")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_files())
                if self._request.settings.api_keys_file is not None:
                    tasks.create_task(self._follow_keys(self._request.settings.api_keys_file))
                if self._screen.interactive:
                    tasks.create_task(self._show_load())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _follow_files(self) -> None:
        from watchfiles import awatch

        files = {path.resolve() for path in self._request.files}
        folders = {path.parent for path in files}
        # Folders are watched, because editors replace a file by a new one.
        watcher = awatch(*folders, watch_filter=lambda _, path: Path(path).resolve() in files, recursive=False)
        try:
            async for _ in watcher:
                await self._apply_edit()
        except (OSError, RuntimeError) as error:
            # For example, no inotify watches are left. Serving must go on.
            self._screen.warn(f"edits of the file are not noticed ({error}); restart `pagemill up` to apply them")

    async def _follow_keys(self, path: Path) -> None:
        """Warn when the file of API keys becomes invalid, because the keys known before stay in use."""
        shown = ""
        while True:
            fault = await asyncio.to_thread(_fault_of, path)
            if fault and fault != shown:
                self._screen.warn(f"{fault}; the keys known before stay in use")
            shown = fault
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _apply_edit(self) -> None:
        result = load_files(self._request.files, self._loaded)
        if faults := [*map(str, result.findings), *missing_for(result.loaded, self._request.settings)]:
            report_errors(faults)
            self._screen.warn("the edit has errors and is not applied; everything runs on unchanged")
            return
        changes = describe_changes(self._loaded, result.loaded)
        gone = {plan.key for plan in self._plans} - {item.plan.key for item in result.loaded}
        self._loaded = result.loaded
        for line in changes:
            self._screen.line(line)
        if changes:
            for line in notes_of(self._loaded):
                self._screen.line(line)
            await self._backend.forget(gone)
            await self._backend.apply(self._plans)

    async def _show_load(self) -> None:
        before = MachineLoad()
        while True:
            load = await self._backend.load()
            rate = load.tokens_per_s(before) if before.at_s else 0.0
            self._screen.status(self._status_line(load, rate))
            before = load
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), 1.0)
                # Events come in bursts while replicas start and stop; this limits redrawing to four times a second.
                await asyncio.sleep(0.25)
            self._news.clear()

    def _status_line(self, load: MachineLoad, tokens_per_s: float) -> str:
        parts = [self._replicas_text(plan) for plan in self._plans]
        engines = load.engines
        parts += [
            f"KV {engines.kv_cache_usage:.0%}",
            f"{engines.num_requests_running} running",
            f"{load.num_queued + engines.num_requests_waiting} waiting",
        ]
        if load.ttft_ms is not None:
            parts.append(f"TTFT p95 {_seconds(load.ttft_ms)}")
        return " | ".join([*parts, f"{tokens_per_s:.0f} tok/s"])

    def _replicas_text(self, plan: Plan) -> str:
        observation = self._backend.observe(plan.key)
        ready, wanted = len(observation.ready()), (observation.plan or plan).replicas
        finding = self._finding(plan, "Ready")
        why = "" if finding.status == "True" else f" ({finding.message})"
        if self._backend.is_capped(plan.key):
            why += " (needs more than maxReplicas)"
        return f"{plan.name} {ready}/{wanted} ready{why}"


def _seconds(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def _fault_of(path: Path) -> str:
    """Return what is wrong with a file of API keys; empty if nothing is."""
    try:
        check_keys_file(path)
    except KeysFileError as error:
        return str(error)
    return ""


def missing_for(loaded: Sequence[Loaded], settings: LocalSettings) -> Iterator[str]:
    """Yield what this machine lacks for the deployments: GPUs, or torch, which computes on them."""
    for item in loaded:
        gpus = item.plan.gpus_per_replica
        if not gpus:
            continue
        parts = "" if gpus == 1 else f", one for each part of tensorParallel x pipelineParallel ({gpus})"
        where = f"{item.document.file}: {item.plan.name}: spec.resources.gpus asks for GPUs{parts}, but"
        if not settings.gpus:
            yield f"{where} this machine has no NVIDIA GPU that CUDA sees; set it to 0 to compute on the CPU"
        elif gpus > len(settings.gpus):
            yield f"{where} CUDA sees {len(settings.gpus)} on this machine; lower tensorParallel or pipelineParallel"
        elif find_spec("torch") is None:
            yield f"{where} torch is not installed; install `pagemill[torch]`, or set it to 0 to compute on the CPU"


def notes_of(loaded: Sequence[Loaded]) -> Iterator[str]:
    """Yield a line for each field that has no effect on this machine."""
    for item in loaded:
        for each in item.plan.ignored:
            yield f"note: {item.document.file}: {item.plan.name}: {each.as_ignored}"
