"""Measures rows: starts the peers, runs them alternately, and keeps their values or why they failed.

While one peer is measured, all other loaded peers are stopped by a signal, so that they use no core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from report import machine, progress

from peers import http_load, rows, weights
from peers.catalogue import Peer, Server, Worker
from peers.install import FOLDER
from peers.process import MemoryWatch, PeerFailed, PeerProcess
from peers.results import Problem, Results, Sample
from peers.rows import Row, Size
from peers.wire import Jobs

START_TIMEOUT_S = 400.0


@dataclass
class Resident:
    """A loaded peer."""

    peer: Peer
    process: PeerProcess
    server: Server | None
    """None: a worker."""
    about: dict[str, Any]
    ready_s: float
    timeout_s: float

    def seconds(self, jobs: Jobs) -> float:
        """Run all jobs at once; return the seconds until the last is done, by the worker's clock or an HTTP
        client's.
        """
        if self.server is not None:
            return self.load(jobs, clients=len(jobs))[0]
        answer = self.process.ask({"jobs": jobs}, self.timeout_s)
        if answer["num_tokens"] != [num for _, num in jobs]:
            raise PeerFailed("answers of other lengths than asked for")
        seconds: float = answer["seconds"]
        return seconds

    def load(self, jobs: Jobs, clients: int) -> tuple[float, list[http_load.Answer]]:
        assert self.server is not None
        try:
            return http_load.send(self.server.url, self.server.model, jobs, clients)
        except* (OSError, TimeoutError, http_load.LoadError, aiohttp.ClientError) as group:
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise PeerFailed(f"{type(first).__name__}: {first}"[:200]) from None


class Session:
    def __init__(self, size: Size, runs: Sequence[int], timeout_s: float, quick: bool) -> None:
        """`runs` are the numbers of the runs, which select their prompts; `timeout_s` limits one run of one row."""
        self._size = size
        self._runs = runs
        self._timeout_s = timeout_s
        self.results = Results(machine(), quick)

    def measure(self, chosen: Sequence[Row], peers: Sequence[Peer]) -> None:
        starts = [row for row in chosen if row.form == "start"]
        offline = [row for row in chosen if row.form == "offline"]
        online = [row for row in chosen if row.form == "online"]
        for row in starts:
            self._measure_starts(row, peers)
        if offline:
            self._in_turns(offline, peers, self._start_offline, self._offline)
        if online:
            self._in_turns(online, [peer for peer in peers if peer.server], self._start_server, self._online)

    def not_there(self, peer: Peer, chosen: Sequence[Row], cause: str) -> None:
        for row in chosen:
            self.results.problems.append(Problem(peer.name, row.name, cause))
            progress(f"{row.name:10} {peer.name}: {cause}")

    def _measure_starts(self, row: Row, peers: Sequence[Peer]) -> None:
        failed: set[str] = set()
        for run in self._runs:
            for peer in peers:
                if peer.name in failed:
                    continue
                try:
                    resident = self._start_server(peer) if peer.server else self._start_offline(peer)
                except PeerFailed as failure:
                    failed.add(peer.name)
                    self.not_there(peer, [row], str(failure))
                    continue
                resident.process.stop()
                self._keep(peer, row, run, {"seconds": resident.ready_s})

    def _in_turns(
        self,
        chosen: Sequence[Row],
        peers: Sequence[Peer],
        start: Callable[[Peer], Resident],
        measure: Callable[[Resident, Row, int], dict[str, Any]],
    ) -> None:
        residents: dict[str, Resident] = {}
        try:
            for peer in peers:
                try:
                    residents[peer.name] = self._warmed(start(peer))
                except PeerFailed as failure:
                    self.not_there(peer, chosen, str(failure))
            for position, row in enumerate(chosen):
                for run in self._runs:
                    for resident in list(residents.values()):
                        try:
                            with _awake(resident):
                                self._keep(resident.peer, row, run, measure(resident, row, run))
                        except PeerFailed as failure:
                            residents.pop(resident.peer.name).process.stop()
                            self.not_there(resident.peer, chosen[position:], str(failure))
        finally:
            for resident in residents.values():
                resident.process.stop()

    def _warmed(self, resident: Resident) -> Resident:
        try:
            resident.seconds(rows.warm_up())
        except PeerFailed:
            resident.process.stop()
            raise
        resident.process.pause()
        return resident

    def _start_offline(self, peer: Peer) -> Resident:
        if peer.worker is None:
            return self._start_server(peer)
        how: Worker = peer.worker(weights.path_of(peer.weights))
        process = PeerProcess(how.argv, how.environment, FOLDER / "logs" / f"{peer.name}.log")
        about = _or_stop(process, lambda: process.answer(START_TIMEOUT_S))["about"]
        return self._resident(peer, process, None, about)

    def _start_server(self, peer: Peer) -> Resident:
        assert peer.server is not None
        how = peer.server(weights.path_of(peer.weights))
        process = PeerProcess(how.argv, how.environment, FOLDER / "logs" / f"{peer.name}-server.log")
        _or_stop(process, lambda: process.wait_http(how.ready_url, START_TIMEOUT_S))
        resident = self._resident(peer, process, how, {})
        said = process.output()
        if how.must_say not in said:
            process.stop()
            raise PeerFailed(f"did not say `{how.must_say.strip(' ,')}`: the native path fell back")
        return resident

    def _resident(self, peer: Peer, process: PeerProcess, server: Server | None, about: dict[str, Any]) -> Resident:
        ready_s = time.perf_counter() - process.started_s
        self.results.about.setdefault(peer.name, {}).update(about)
        progress(f"{'ready':10} {peer.name}: {ready_s:.2f} s")
        return Resident(peer, process, server, about, ready_s, self._timeout_s)

    def _offline(self, resident: Resident, row: Row, run: int) -> dict[str, Any]:
        if row.name == "single":
            return _single(resident, run)
        if row.name == "prefill":
            seconds = resident.seconds(rows.prefill(run))
            return {"seconds": seconds, "tok_per_s": rows.PREFILL_TOKENS / seconds}
        if row.name == "prefix":
            return {"seconds": resident.seconds(rows.prefix(run))}
        jobs = rows.mixed(self._size.mixed_requests, run)
        with MemoryWatch(resident.process.pid) as memory:
            seconds = resident.seconds(jobs)
        num_tokens = sum(num for _, num in jobs)
        return {"seconds": seconds, "tok_per_s": num_tokens / seconds, "peak_mib": memory.peak_mib}

    def _online(self, resident: Resident, row: Row, run: int) -> dict[str, Any]:
        jobs = rows.online(row, self._size.online_requests[row.name], run)
        seconds, answers = resident.load(jobs, row.clients)
        return {
            "seconds": seconds,
            "tok_per_s": sum(answer.num_tokens for answer in answers) / seconds,
            "ttft_ms": _ms(answer.ttft_s for answer in answers),
            "tpot_ms": _ms(answer.tpot_s for answer in answers),
            "itl_ms": _ms(gap for answer in answers for gap in answer.gaps_s),
        }

    def _keep(self, peer: Peer, row: Row, run: int, values: dict[str, Any]) -> None:
        self.results.samples.append(Sample(peer.name, row.name, run, values))
        shown = ", ".join(f"{key} {value:.2f}" for key, value in values.items() if isinstance(value, float))
        progress(f"{row.name:10} {peer.name}, run {run}: {shown}")


def _single(resident: Resident, run: int) -> dict[str, Any]:
    whole, first_only = rows.single(run)
    first_s = resident.seconds(first_only)
    whole_s = resident.seconds(whole)
    return {
        "ttft_ms": first_s * 1000,
        "seconds": whole_s,
        "tok_per_s": (rows.SINGLE_OUTPUT - 1) / max(whole_s - first_s, 1e-9),
    }


@contextmanager
def _awake(resident: Resident) -> Iterator[None]:
    resident.process.resume()
    yield
    resident.process.pause()


def _or_stop(process: PeerProcess, wait: Callable[[], Any]) -> Any:
    try:
        return wait()
    except PeerFailed:
        process.stop()
        raise


def _ms(seconds: Any) -> list[float]:
    return [round(each * 1000, 3) for each in seconds]
