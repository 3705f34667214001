"""`python -m pagemill_engine.drain --settings FILE`: drains the engine before its pod gets SIGTERM (Kubernetes'
preStop).

It asks the engine on this machine to drain and waits a few seconds for every gateway's acknowledgement. In a pod of a
group that only computes it waits until the group's first pod, which is drained at the same time, has ended its ranks:
without them that pod could not finish its requests. Ranks that have joined no other compute nothing, and are not waited
for. It uses only the standard library, without its HTTP client: it must start at once, also on a busy machine. If no
engine listens there is nothing to drain and it succeeds; a refusal or an error is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

WAIT_S = 5.0
"""Longest wait for the gateways' acknowledgements; the engine answers as soon as all have arrived."""
ANSWER_TIMEOUT_S = 2.0
"""Additional time for the engine's answer."""
MAX_ANSWER_BYTES = 64 * 1024
RANK_MODULE = b"pagemill_execution.starting.node_rank"
RANKS_POLL_S = 0.2
ESTABLISHED = "01"
"""The state of an open connection in `/proc/PID/net/tcp`."""
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1", "": "127.0.0.1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Drain the engine and return the exit code.

    0: drained or nothing to drain. 1: refused or failed. 2: wrong command line.
    """
    parser = argparse.ArgumentParser(prog="python -m pagemill_engine.drain", description="Drain the engine here.")
    parser.add_argument("--settings", required=True, help="the settings file that the engine was started with")
    parser.add_argument("--wait-s", type=float, default=WAIT_S, help="longest wait for acknowledgements")
    arguments = parser.parse_args(argv)
    try:
        with open(arguments.settings, "rb") as file:
            content = json.load(file)
        server = content.get("server", {})
        status, answer = drain(server, arguments.wait_s)
    except ConnectionRefusedError:
        if (content.get("engine", {}).get("nodes") or {}).get("of_group"):
            wait_for_ranks()
            return 0
        sys.stderr.write("drain: no engine listens here; nothing to drain\n")
        return 0
    except (OSError, ValueError, LookupError, AttributeError) as error:
        sys.stderr.write(f"drain: {type(error).__name__}: {error}\n")
        return 1
    sys.stderr.write(f"drain: {status} {answer}\n")
    return 0 if status == 200 else 1


def wait_for_ranks(processes: Path = Path("/proc")) -> None:
    """Wait until no rank here is connected to others; the pod's grace period ends the wait if need be."""
    while any(_is_joined_rank(each) for each in processes.glob("[0-9]*")):
        time.sleep(RANKS_POLL_S)


def _is_joined_rank(process: Path) -> bool:
    """Whether a process is a rank that has a connection to another one: the kernel knows it, whatever the rank does."""
    return RANK_MODULE in _arguments(process) and not _sockets(process).isdisjoint(_connections(process))


def _arguments(process: Path) -> list[bytes]:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []  # it has ended


def _sockets(process: Path) -> set[str]:
    """Return the inodes of the process's sockets."""
    found = set()
    with suppress(OSError):  # it has ended
        for each in (process / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                found.add(os.readlink(each).removeprefix("socket:[").removesuffix("]"))
    return found


def _connections(process: Path) -> Iterator[str]:
    """Yield the inodes of open TCP connections of the process's network namespace (`man 5 proc_pid_net`)."""
    for family in ("tcp", "tcp6"):
        with suppress(OSError):  # it has ended, or the kernel has no IPv6
            for line in (process / "net" / family).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == ESTABLISHED:
                    yield fields[9]


def drain(server: Mapping[str, Any], wait_s: float) -> tuple[int, str]:
    """Return status and body of the engine's answer.

    Raises `OSError`, or `ValueError` or `LookupError` if the answer is not HTTP.
    """
    host = server.get("control_host", "127.0.0.1")
    address = (ANY_ADDRESS.get(host, host), server.get("control_port", 8001))
    with _connect(address, wait_s + ANSWER_TIMEOUT_S, is_tls=server.get("tls") is not None) as connection:
        connection.sendall(_request(_token(server, *connection.getpeername()[:2]), wait_s))
        with connection.makefile("rb") as answer:
            raw = answer.read(MAX_ANSWER_BYTES)
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split(maxsplit=2)[1]), body.decode("utf-8", "replace")


def _connect(address: tuple[str, int], timeout_s: float, *, is_tls: bool) -> socket.socket:
    connection = socket.create_connection(address, timeout=timeout_s)
    if not is_tls:
        return connection
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the engine of this pod, on this machine
    return context.wrap_socket(connection)


def _request(token: str, wait_s: float) -> bytes:
    """Return the request. With HTTP/1.0 the answer ends with the connection."""
    guard = [f"Authorization: Bearer {token}"] if token else []
    lines = [f"POST /internal/drain?wait_s={wait_s} HTTP/1.0", "Host: localhost", "Content-Length: 0", *guard]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _token(server: Mapping[str, Any], address: str, port: int) -> str:
    path = server.get("internal_tokens_file")
    if path:
        with open(path, encoding="utf-8") as file:
            for line in map(str.strip, file):
                if line and not line.startswith("#"):
                    return line
    if token := str(server.get("internal_token", "")):
        return token
    # Rarely called: a pod's engine always has a configured token.
    from pagemill_servers.secrets.token_file import read_generated_token

    return read_generated_token(f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}")


if __name__ == "__main__":
    sys.exit(main())
