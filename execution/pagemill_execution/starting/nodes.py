"""Loads a model among processes of several nodes: rank 0 on node 0, the others wherever they join from.

Each node runs as many ranks as the others, in their order; those of a node are children (`node_rank`). They exchange by
TCP. Rank 0 gives them its settings, so that only what differs by node is its own: the model's path and the threads.
`load_ranks` loads among processes of one machine.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pagemill_execution.config import ExecutionConfig, NodesConfig
from pagemill_execution.runners.base import Runner
from pagemill_execution.runners.ranks.identity import RankIdentity, RankReport, check_same
from pagemill_execution.runners.ranks.processes import ends_of
from pagemill_execution.runners.ranks.ranked import RankedRunner
from pagemill_execution.sizing.compute import Compute
from pagemill_execution.sizing.memory import MemoryState
from pagemill_execution.sizing.rank_parts import check_division, part_of
from pagemill_execution.starting.load_ranks import (
    RankSettings,
    check_settings,
    first_rank,
    measured,
    meet,
    overlapped,
    read_together,
    signals_of,
    speeds_of,
    with_bytes,
)
from pagemill_execution.starting.preparing import ModelFiles, PreparedModel, prepare, refusals
from pagemill_execution.starting.rendezvous import Joining, Key, Listener, Member, listen, token_of
from pagemill_execution.starting.threads import threads_of_ranks, torch_threads
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.cpu import launch
from pagemill_kernels.ranks.connections import receive_frame, send_frame
from pagemill_kernels.ranks.group import GroupAborted
from pagemill_kernels.ranks.messages_over_tcp import TcpWriter
from pagemill_kernels.ranks.places import STUCK_SECONDS
from pagemill_kernels.ranks.rank_signals import RankSignals
from pagemill_kernels.ranks.tcp_group import TcpGroup

if TYPE_CHECKING:
    from pagemill_kernels.ranks.distributed import Meeting

logger = logging.getLogger(__name__)

RANK_PROCESS = "pagemill_execution.starting.node_rank"
CLOSE_SECONDS = 10.0


class NodeRankSettings(msgspec.Struct):
    """What a rank's process is given by its node."""

    config: ExecutionConfig
    path: str
    rank: int
    parent: int
    num_threads: int


class Invitation(msgspec.Struct):
    """What rank 0 gives to a rank that has joined."""

    settings: RankSettings
    addresses: dict[int, tuple[str, int]]
    """Where ranks listen that this one opens connections to, besides rank 0."""


def load_on_nodes(files: ModelFiles, compute: Compute, stuck_seconds: float = STUCK_SECONDS) -> Runner:
    """Return a runner whose model the ranks of all nodes compute. Raises `LoadError`."""
    return overlapped(load_nodes(files, compute, stuck_seconds), files, compute)


def load_nodes(files: ModelFiles, compute: Compute, stuck_seconds: float = STUCK_SECONDS) -> RankedRunner:
    """Return the runner of rank 0, behind the ranks of all nodes. Raises `LoadError`."""
    config, nodes = files.config, files.config.nodes
    assert nodes is not None
    token, threads = token_of(nodes), threads_of_ranks(config)
    check_settings(config, compute)
    check_division(files.spec, config.num_ranks, config.pipeline_parallel_size)
    launch.set_num_threads(threads[0])
    prepare_thread = torch_threads(compute, threads[0])
    waiting = partial(files.progress, "loading")
    listener = listen(nodes, token, waiting)
    children = NodeProcesses(config, str(files.path), threads, range(1, config.ranks_here))
    members: dict[int, Member] = {}
    try:
        meeting = meet(config, compute, nodes.address)
        members = _members(config, nodes, listener, children, waiting)
        with refusals(files.path):
            others = _other_nodes(nodes, members) if meeting is None else []  # devices are measured by their ranks
            prepared = prepare(files, compute, measured(compute), others)
            config, part = prepared.config, part_of(files.spec, 0, config.num_ranks, prepared.stages)
            _invite(files, prepared, members, stuck_seconds, meeting)
            connections = _connections(config, nodes, listener, children)
            values = {rank: connections["values", rank] for rank in members}
            group = TcpGroup(values, 0, config.num_ranks, config.tensor_parallel_size, stuck_seconds)
            names = {rank: f"node {each.joining.node} at {each.host}" for rank, each in members.items()}
            watched: Any = group if meeting is None else signals_of(group, compute, stuck_seconds)
            identity = RankIdentity.own(prepared.weights.digest())
            try:
                inner = first_rank(files, prepared, part, group, None, meeting, watched)
            except GroupAborted:
                _reports(members, names, identity)  # raises what the one said that has ended
                raise
        reports = _reports(members, names, identity)
        with_bytes(inner, sum(reports[rank].num_bytes for rank in range(1, config.ranks_here)))
        signals = RankSignals(group, {rank: each.connection for rank, each in members.items()}, names)
        for each in members.values():
            send_frame(each.connection, b"start")
    except BaseException:
        listener.abandon()
        children.kill()
        raise
    finally:
        listener.close()
    signals.start()
    plans = TcpWriter({f"rank {rank} ({names[rank]})": connections["plans", rank] for rank in members})
    joined = JoinedRanks(signals, group, children)
    speeds = speeds_of(config, files.spec, prepared.stages)
    runner = RankedRunner(
        inner, plans, watched, joined, speeds, config.pipeline_parallel_size, prepare_thread,
        on_device=meeting is not None,
    )  # fmt: skip
    read_together(runner, signals.answers, sends_files=True)
    return runner


def run_node(config: ExecutionConfig, path: Path) -> None:
    """Run the ranks of a node that is not node 0 until rank 0 or a signal ends them. Raises `LoadError`. `path`: of the
    model's files. A pod of a group then waits for its signal: a container that is started again would join the
    next group."""
    nodes = config.nodes
    assert nodes is not None
    token_of(nodes)
    first = nodes.rank * config.ranks_here
    children = NodeProcesses(config, str(path), threads_of_ranks(config), range(first, first + config.ranks_here))
    ending = threading.Event()

    def end(*_: object) -> None:
        ending.set()
        children.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    children.wait()
    if nodes.of_group:
        ending.wait()


class NodeProcesses:
    """The ranks of a node, as children."""

    def __init__(self, config: ExecutionConfig, path: str, threads: Sequence[int], ranks: range) -> None:
        """Start them. `threads`: of each rank of the node, also of one that is no child."""
        self._ranks = ranks
        self._is_ending = False
        self._processes = []
        for rank in ranks:
            settings = NodeRankSettings(config, path, rank, os.getpid(), threads[rank % config.ranks_here])
            process = subprocess.Popen(
                [sys.executable, "-m", RANK_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(settings))
            process.stdin.close()
            self._processes.append(process)

    def check(self) -> None:
        """Raise `LoadError` if one has ended."""
        for rank, process in zip(self._ranks, self._processes, strict=True):
            if process.poll() is not None:
                raise _said(process) or _ended(rank, process)

    def wait(self) -> None:
        """Wait until all have ended; the others of one that fails are ended. Raises `LoadError` with what it says."""
        for index in ends_of(self._processes):
            process = self._processes[index]
            if process.wait() and not self._is_ending:
                error = _said(process) or _ended(self._ranks[index], process)
                self.kill()
                raise error

    def terminate(self) -> None:
        self._is_ending = True
        for process in self._processes:
            process.terminate()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()

    def close(self) -> None:
        for process in self._processes:
            try:
                process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


class RankError(msgspec.Struct):
    """What a rank's process says last on standard output if it fails."""

    reason: str
    message: str


def _said(process: subprocess.Popen[bytes]) -> LoadError | None:
    assert process.stdout is not None
    try:
        error = msgspec.json.decode(process.stdout.read(), type=RankError)
    except msgspec.DecodeError:
        return None
    return LoadError(error.reason, error.message)


def _ended(rank: int, process: subprocess.Popen[bytes]) -> LoadError:
    return LoadError("RankLost", f"Rank {rank} ended with the exit code {process.returncode}; its log says why.")


class JoinedRanks:
    """All ranks but rank 0, as `RankedRunner` ends them."""

    def __init__(self, signals: RankSignals, group: TcpGroup, children: NodeProcesses) -> None:
        self._signals, self._group, self._children = signals, group, children

    def close(self) -> None:
        self._signals.let_end()
        self._signals.wait_for_ends(CLOSE_SECONDS if not self._group.is_lost else 0.0)
        self._signals.close()
        self._group.close()
        self._children.close()

    def kill(self) -> None:
        """End those of this node at once; others end when their connections do."""
        self._signals.let_end()
        self._children.kill()


def _members(
    config: ExecutionConfig,
    nodes: NodesConfig,
    listener: Listener,
    children: NodeProcesses,
    waiting: Callable[[str], None],
) -> dict[int, Member]:
    """Wait until all ranks have joined; `waiting` is called with those that are missing. Raises `LoadError` that names
    those that have not come, or that differ."""
    wanted: list[Key] = [("join", rank) for rank in range(1, config.num_ranks)]
    deadline = time.monotonic() + nodes.timeout_s
    named: list[str] = []

    def where(left: Iterable[Key]) -> str:
        return ", ".join(f"rank {rank} of node {rank // config.ranks_here}" for _, rank in sorted(left))

    def check(left: set[Key]) -> None:
        children.check()
        if named != [where(left)]:
            named[:] = [where(left)]
            waiting(f"waiting for {named[0]} to join {nodes.address}:{nodes.port}; the logs of these nodes say why")

    found = listener.collect(wanted, deadline, check)
    if len(found) < len(wanted):
        missing = set(wanted) - found.keys()
        raise LoadError(
            "RendezvousFailed",
            f"{where(missing)} did not join node 0 at {nodes.address}:{nodes.port} within {nodes.timeout_s:g} s. Start "
            "these nodes with --node-rank and the same --nnodes, --master-addr and --master-port, read their logs, and "
            "let the network pass connections between the nodes.",
        )
    own = RankIdentity.own()
    members = {}
    for (_, rank), connection in found.items():
        joining = msgspec.json.decode(receive_frame(connection), type=Joining)
        host = connection.getpeername()[0]
        who = f"Rank {rank} (node {joining.node} at {host})"
        check_same(who, joining.identity, own)
        _check_shape(who, joining, config, nodes)
        members[rank] = Member(connection, host, joining)
    return members


def _check_shape(who: str, joining: Joining, config: ExecutionConfig, nodes: NodesConfig) -> None:
    for name, found, own in (
        ("tensor_parallel_size", joining.tensor_parallel_size, config.tensor_parallel_size),
        ("pipeline_parallel_size", joining.pipeline_parallel_size, config.pipeline_parallel_size),
        ("nnodes", joining.num_nodes, nodes.count),
    ):
        if found != own:
            raise LoadError("RankMismatch", f"{who} has {name} {found}, but rank 0 has {own}. Start all nodes alike.")


def _other_nodes(nodes: NodesConfig, members: dict[int, Member]) -> list[MemoryState]:
    """Return the memory of each other node."""
    by_node = {each.joining.node: each.joining.memory for each in members.values()}
    return [by_node[number] for number in range(1, nodes.count)]


def _invite(
    files: ModelFiles,
    prepared: PreparedModel,
    members: dict[int, Member],
    stuck_seconds: float,
    meeting: Meeting | None,
) -> None:
    config = prepared.config
    capacity = config.step.max_num_batched_tokens * files.spec.hidden_size
    plain = msgspec.structs.replace(config, nodes=None, model_folder=None)
    for rank, member in members.items():
        settings = RankSettings(
            plain, "", rank, 0, 0, -1, -1, None, capacity, stuck_seconds, prepared.num_blocks, prepared.stages,
            prepared.draft_block_bytes, None if meeting is None else (meeting.address, meeting.port),
        )  # fmt: skip
        below = {other: (each.host, each.joining.port) for other, each in members.items() if other < rank}
        send_frame(member.connection, msgspec.json.encode(Invitation(settings, below)))


def _connections(
    config: ExecutionConfig, nodes: NodesConfig, listener: Listener, children: NodeProcesses
) -> dict[Key, Any]:
    purposes: list[Key] = [("plans", rank) for rank in range(1, config.num_ranks)]
    purposes += [("values", rank) for rank in range(1, config.num_ranks)]
    found = listener.collect(purposes, time.monotonic() + nodes.timeout_s, lambda left: children.check())
    missing = [rank for purpose, rank in purposes if (purpose, rank) not in found]
    if missing:
        raise LoadError("RankLost", f"Rank {missing[0]} has joined, but opened no connection for values.")
    return found


def _reports(members: dict[int, Member], names: dict[int, str], own: RankIdentity) -> dict[int, RankReport]:
    """Wait until all ranks have loaded. Raises `LoadError` with the message of one that cannot."""
    found = {}
    for rank, member in members.items():
        who = f"Rank {rank} ({names[rank]})"
        try:
            report = msgspec.json.decode(receive_frame(member.connection), type=RankReport)
        except (OSError, EOFError) as error:
            raise LoadError("RankLost", f"{who} ended while it loaded its part of the model.") from error
        check_same(who, report.identity, own)
        if report.error:
            raise LoadError("RankLost", f"{who} did not load its part of the model: {report.error}")
        found[rank] = report
    return found
