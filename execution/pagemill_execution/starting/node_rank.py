"""The process of a rank that joins rank 0 over the network: loads its part, and runs what rank 0 sends.

Its node starts it (`nodes`). It ends when rank 0 ends the group or is lost, and with its parent; the exit code says
which.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress

import msgspec

from pagemill_execution.config import NodesConfig
from pagemill_execution.runners.ranks.follower import FollowedGroup, Follower, follow
from pagemill_execution.runners.ranks.identity import RankIdentity, RankReport
from pagemill_execution.sizing.memory import measure_memory
from pagemill_execution.starting.load_ranks import RankSettings, follower_of
from pagemill_execution.starting.nodes import CLOSE_SECONDS, Invitation, NodeRankSettings, RankError
from pagemill_execution.starting.rank_process import end_with
from pagemill_execution.starting.rendezvous import Joining, Key, Listener, Purpose, open_to, token_of
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.ranks.connections import listening, receive_frame, send_frame
from pagemill_kernels.ranks.group import GroupAborted
from pagemill_kernels.ranks.messages_over_tcp import TcpReader
from pagemill_kernels.ranks.rank_signals import RankSignals
from pagemill_kernels.ranks.tcp_group import TcpGroup
from pagemill_servers.process import logs
from pagemill_servers.process.malloc import trim_heap

logger = logging.getLogger(__name__)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to end
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=NodeRankSettings)
    logs.configure(logging.WARNING, process=f"rank {settings.rank}")
    end_with(settings.parent)
    try:
        run(settings)
    except LoadError as error:
        failed = RankError(error.reason, error.message)
    except (OSError, EOFError) as error:
        failed = RankError(
            "RankLost", f"Rank 0 ended the connection before all ranks had loaded ({error}); see its log."
        )
    else:
        return 0
    logger.error("%s", failed.message)
    sys.stdout.buffer.write(msgspec.json.encode(failed))
    return 1


def run(settings: NodeRankSettings) -> None:
    """Join, load, and follow until rank 0 closes. Raises `LoadError`, and `OSError` and `EOFError` if rank 0 ends
    before all have loaded."""
    nodes, rank = settings.config.nodes, settings.rank
    assert nodes is not None
    token = token_of(nodes)
    with ExitStack() as stack:

        def opened(purpose: Purpose, at: tuple[str, int] | None = None) -> socket.socket:
            connection = open_to(purpose, rank, nodes, token, at)
            stack.callback(connection.close)
            return connection

        control = opened("join")
        listener = Listener(listening(control.getsockname()[0], 0), token)
        stack.callback(listener.abandon)
        send_frame(control, msgspec.json.encode(_joining(settings, nodes, listener.port)))
        invitation = msgspec.json.decode(receive_frame(control), type=Invitation)
        plans, values = opened("plans"), {0: opened("values")}
        values |= {other: opened("values", at) for other, at in invitation.addresses.items()}
        size = settings.config.num_ranks
        wanted: list[Key] = [("values", other) for other in range(rank + 1, size)]
        found = listener.collect(wanted, time.monotonic() + nodes.timeout_s, lambda left: None)
        listener.close()
        values |= {other: connection for (_, other), connection in found.items()}
        if len(values) < size - 1:
            raise LoadError("RankLost", "Other ranks have joined, but opened no connection for values.")
        _follow(settings, invitation.settings, values, plans, control)


def _follow(
    settings: NodeRankSettings,
    invited: RankSettings,
    values: Mapping[int, socket.socket],
    plans: socket.socket,
    control: socket.socket,
) -> None:
    given = msgspec.structs.replace(invited, path=settings.path, num_threads=settings.num_threads)
    members = settings.config.tensor_parallel_size
    group = TcpGroup(values, settings.rank, settings.config.num_ranks, members, given.stuck_seconds)
    runner, followed = _loaded(given, group, control, lambda text: signals.answer(text))
    if receive_frame(control) != b"start":
        raise EOFError("unknown message")
    signals = RankSignals(group, {0: control}, {})
    signals.start()
    try:
        is_closed = follow(runner, TcpReader(plans, group), followed)
    except GroupAborted:
        is_closed = False  # the reason says more
    signals.let_end()
    if is_closed:
        signals.say_end(CLOSE_SECONDS)
    signals.close()
    if not is_closed:
        raise LoadError("RankLost", f"The ranks stopped: {group.reason() or 'rank 0 ended its connection'}")


def _joining(settings: NodeRankSettings, nodes: NodesConfig, port: int) -> Joining:
    config = settings.config
    return Joining(
        RankIdentity.own(), nodes.rank, nodes.count, config.tensor_parallel_size, config.pipeline_parallel_size, port,
        measure_memory(),
    )  # fmt: skip


def _loaded(
    settings: RankSettings, group: TcpGroup, control: socket.socket, answer: Callable[[str], None]
) -> tuple[Follower, FollowedGroup]:
    try:
        runner, followed = follower_of(settings, group, answer)
    except Exception as error:
        report = RankReport(RankIdentity.own(), error=f"{type(error).__name__}: {error}")
        with suppress(OSError):
            send_frame(control, msgspec.json.encode(report))
        raise
    trim_heap()
    report = RankReport(RankIdentity.own(runner.info.weights_digest), runner.info.weight_bytes)
    send_frame(control, msgspec.json.encode(report))
    return runner, followed


if __name__ == "__main__":
    sys.exit(main())
