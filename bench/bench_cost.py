"""Measures what `pagemill bench` itself costs: CPU time a request, beside a program that only waits and receives.

A server in a process of its own answers at set times, so that nothing but the client varies. The other program is the
least that can note when each event came: `epoll` and `recv` on the same connections, without reading what came.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import select
import socket
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import uvloop
from report import emit, progress

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'
GOAL_MS = 1.0


def main() -> None:
    args = _arguments()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs, args.output_tokens, args.ttft_ms / 1000, args.itl_ms / 1000), daemon=True
    )
    server.start()
    port = ours.recv()
    runs: dict[str, list[float]] = {"pagemill bench": [], "epoll and recv": []}
    for number in range(args.runs):
        progress(f"run {number + 1} of {args.runs}")
        runs["pagemill bench"].append(_command_ms(port, args))
        runs["epoll and recv"].append(_least_ms(port, args))
    server.terminate()
    rows = [[name, statistics.median(each), min(each), max(each)] for name, each in runs.items()]
    about = {"requests": args.requests, "clients": args.clients, "events": args.output_tokens}
    emit("bench_cost", ["CPU ms a request", "median", "least", "most"], rows, {"runs": runs, **about})


def _command_ms(port: int, args: argparse.Namespace) -> float:
    argv = [sys.executable, "-m", "pagemill", "bench", "--url", f"http://127.0.0.1:{port}", "-o", "json"]
    argv += ["--requests", str(args.requests), "--concurrency", str(args.clients)]
    done = subprocess.run([*argv, "--output-tokens", str(args.output_tokens)], stdout=subprocess.PIPE, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["client_cpu_ms_per_request"])


def _least_ms(port: int, args: argparse.Namespace) -> float:
    """Receive as many answers in this process, by one loop of system calls."""
    body = json.dumps({"model": "m", "messages": [], "max_tokens": args.output_tokens, "stream": True}).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    start, left, times = _cpu_s(), args.requests - args.clients, []
    with select.epoll() as waiting:
        sockets = {}
        for _ in range(args.clients):
            each = socket.create_connection(("127.0.0.1", port))
            sockets[each.fileno()] = each
            waiting.register(each, select.EPOLLIN)
            each.send(request)
        while sockets:
            for number, _ in waiting.poll():
                part = sockets[number].recv(65536)
                times.append(time.perf_counter())
                if not part.endswith(b"0\r\n\r\n"):
                    continue
                if left > 0:
                    left -= 1
                    sockets[number].send(request)
                else:
                    sockets.pop(number).close()
    cost_ms: float = (_cpu_s() - start) * 1000 / args.requests
    return cost_ms


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(port: Connection, most: int, ttft_s: float, gap_s: float) -> None:
    """Answer every request with events at set times, and send the port that was chosen."""
    uvloop.run(_serve(port, most, ttft_s, gap_s))


async def _serve(port: Connection, most: int, ttft_s: float, gap_s: float) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await _answer(reader, writer, ttft_s, gap_s)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ttft_s: float, gap_s: float) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET"):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(MODELS))
        writer.write(MODELS)
        return
    length = next(line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    body = json.loads(await reader.readexactly(int(length)))
    tokens, loop = body["max_tokens"], asyncio.get_running_loop()
    start = loop.time()
    for number in range(tokens):
        await asyncio.sleep(start + ttft_s + number * gap_s - loop.time())
        writer.write((b"" if number else HEAD) + _chunk(_event(number, tokens)))
    usage = {"prompt_tokens": 64, "completion_tokens": tokens, "total_tokens": 64 + tokens}
    last = b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({**_about(), "choices": [], "usage": usage}).encode()
    writer.write(_chunk(last) + b"0\r\n\r\n")


def _event(number: int, tokens: int) -> bytes:
    ended = "length" if number == tokens - 1 else None
    choice = {"index": 0, "delta": {"content": f" word{number}"}, "logprobs": None, "finish_reason": ended}
    return b"data: %s\n\n" % json.dumps({**_about(), "choices": [choice]}).encode()


def _about() -> dict[str, object]:
    return {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1_760_000_000,
        "model": "m",
    }


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each, in turn; the median counts")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--ttft-ms", type=float, default=100.0)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
