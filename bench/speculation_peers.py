"""Compares decoding with n-gram proposals with vLLM for CPUs and llama.cpp: servers with it and without, in one run.

All have the embedded model in bfloat16 and two threads; llama.cpp is a wheel for processors with AVX2. The works are
those of `speculation`: text that continues a copy, copies that are asked for in chats, and chats. Requests run alone,
or eight chats at a time, on one server after the other in turns; all other servers are stopped meanwhile. A figure is
tokens a second behind the first token, the median of the rounds. Exits with 1 if a figure of Pagemill is missing.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from peers import http_load, llama_cpp, pagemill, vllm_cpu, weights
from peers.catalogue import OURS, THREADS, Server
from peers.install import FOLDER, InstallFailed
from peers.process import PeerFailed, PeerProcess
from report import ROOT, emit, progress
from speculation import MODEL, QUESTIONS, chat_text, copies

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_models.sources import resolve_source
from pagemill_models.tokenizer_files.load_bundle import load_bundle

START_TIMEOUT_S = 400.0
BATCH, MAX_MODEL_LEN, MAX_NUM_SEQS = 8, 2048, 32
OFF, ON = "off", "n-gram"
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
"""vLLM's settings: as many tokens as ours verify at most, and matches of lengths that its documentation uses."""


class Work(NamedTuple):
    name: str
    prompts: list[list[int]]
    num_tokens: int


def ours(mode: str) -> Server:
    method = "off" if mode == OFF else "ngram"
    engine = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "num_threads": THREADS}
    settings = {**engine, "enable_prefix_caching": False, "speculative": {"method": method}}
    return pagemill.server_with(weights.path_of("folder"), "smollm2", settings, {})


def vllm(mode: str) -> Server:
    options = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS), "--no-enable-prefix-caching"]
    options += [] if mode == OFF else ["--speculative-config", json.dumps(NGRAM)]
    return vllm_cpu.server_with(weights.path_of("folder"), "smollm2", options, {})


def llama(mode: str) -> Server:
    return llama_cpp.wheel_server(weights.path_of("bf16"), 0 if mode == OFF else 8)


SERVERS: dict[str, Callable[[str], Server]] = {OURS: ours, "vllm": vllm, "llama.cpp": llama}
INSTALL: dict[str, Callable[[Path], None]] = {
    "vllm": vllm_cpu.install_vllm,
    "llama.cpp": llama_cpp.install_wheel,
}


class SpeculatingServer:
    """A server that is stopped unless it is asked."""

    def __init__(self, engine: str, mode: str) -> None:
        self._server = SERVERS[engine](mode)
        log = FOLDER / "logs" / f"speculation-{engine}-{mode}.log"
        self._process = PeerProcess(self._server.argv, self._server.environment, log)
        try:
            self._process.wait_http(self._server.ready_url, START_TIMEOUT_S)
        except BaseException:  # also a signal
            self._process.kill()
            raise
        progress(f"{engine} {mode}: ready after {time.perf_counter() - self._process.started_s:.0f} s")
        self._process.pause()

    def stop(self) -> None:
        self._process.stop()

    def tokens_per_s(self, work: Work) -> float:
        """Return the rate of all requests together behind their first tokens."""
        self._process.resume()
        try:
            jobs = [(prompt, work.num_tokens) for prompt in work.prompts]
            _, answers = http_load.send(self._server.url, self._server.model, jobs, len(jobs))
        finally:
            self._process.pause()
        return sum(1 / each.tpot_s for each in answers)


def works(num_tokens: int) -> list[Work]:
    tokenizer = Tokenizer(load_bundle(resolve_source(MODEL)))
    alone = [Work(name, [tokenizer.encode(prompt)], num_tokens) for name, prompt in copies().items()]
    chats = [tokenizer.encode(chat_text(question)) for question in QUESTIONS]
    return [*alone, Work("chat", chats[:1], num_tokens), Work(f"chats, {BATCH} at a time", chats[:BATCH], num_tokens)]


def measure(engines: Sequence[str], rounds: int, num_tokens: int, result: dict[str, Any]) -> list[str]:
    """Add the rates of each work by engine and mode; return what failed."""
    problems: list[str] = []
    with ExitStack() as stack:
        servers: dict[tuple[str, str], SpeculatingServer] = {}
        for engine in engines:
            for mode in (OFF, ON):
                try:
                    servers[engine, mode] = SpeculatingServer(engine, mode)
                except PeerFailed as failure:
                    problems.append(f"{engine} {mode}: {failure}")
                    continue
                stack.callback(servers[engine, mode].stop)
        for work in works(num_tokens):
            found = result.setdefault(work.name, {})
            for number in range(-1, rounds):  # the first one warms up
                for (engine, mode), server in servers.items():
                    rate = server.tokens_per_s(work)
                    if number >= 0:
                        found.setdefault(engine, {}).setdefault(mode, []).append(rate)
                    progress(f"{work.name}, round {number}: {engine} {mode} {rate:.0f} tokens/s")
    return problems


def table(result: dict[str, Any], engines: Sequence[str]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for name, by_engine in result.items():
        rates = {
            (engine, mode): statistics.median(by_engine[engine][mode])
            for engine in by_engine
            for mode in by_engine[engine]
        }
        row: list[Any] = [name]
        for engine in engines:
            off, on = rates.get((engine, OFF)), rates.get((engine, ON))
            row += [off, on, on / off if on and off else None]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--engines", nargs="+", default=list(SERVERS), choices=list(SERVERS))
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended
    problems: list[str] = []
    for engine in [each for each in args.engines if each in INSTALL]:
        try:
            INSTALL[engine](args.uv)
        except InstallFailed as failure:
            problems.append(f"{engine}: {failure}")
            args.engines.remove(engine)
    result: dict[str, Any] = {}
    try:
        problems += measure(args.engines, args.rounds, args.tokens, result)
    except SystemExit:  # what was measured until the signal counts
        problems.append("ended by a signal")
    columns = ["tokens/s", *(f"{engine} {what}" for engine in args.engines for what in (OFF, ON, "times"))]
    rows = table(result, args.engines)
    emit("speculation_peers", columns, rows, {"rates": result, "problems": problems})
    if not rows or any(cell is None for row in rows for cell in row[1:4]):
        raise SystemExit(f"a figure of {OURS} is missing: {problems}")


if __name__ == "__main__":
    main()
