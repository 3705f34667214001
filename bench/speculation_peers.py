"""Compares decoding with n-gram proposals with vLLM for CPUs and llama.cpp: servers with it and without, in one run.

All have the embedded model in bfloat16 and two threads; llama.cpp is a wheel for processors with AVX2. The works are
those of `speculation`: text that continues a copy, copies that are asked for in chats, and chats. Requests run alone,
or eight chats at a time, on one server after the other in turns; all other servers are stopped meanwhile. A figure is
tokens a second behind the first token, the median of the rounds. Exits with 1 if a figure of Pagemill is missing.

Six servers take minutes to start, and a round of a work 10 to 25 s. With `--kept` a work's figures are kept in a file
once they are measured, and not measured again; `--only` chooses works, and `--minutes` begins none after so long.
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
BATCH, MAX_MODEL_LEN, MAX_NUM_SEQS, WARM_UP_TOKENS = 8, 2048, 32, 16
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


def works(num_tokens: int, only: Sequence[str] = ("",)) -> list[Work]:
    """Return the works whose names have one of the words of `only`."""
    tokenizer = Tokenizer(load_bundle(resolve_source(MODEL)))
    alone = [Work(name, [tokenizer.encode(prompt)], num_tokens) for name, prompt in copies().items()]
    chats = [tokenizer.encode(chat_text(question)) for question in QUESTIONS]
    every = [*alone, Work("chat", chats[:1], num_tokens), Work(f"chats, {BATCH} at a time", chats[:BATCH], num_tokens)]
    return [work for work in every if any(word in work.name for word in only)]


def measure(
    engines: Sequence[str], rounds: int, wanted: Sequence[Work], result: dict[str, Any], kept: Kept, ends_s: float
) -> list[str]:
    """Add the rates of each work by engine and mode; return what failed. No work begins after `ends_s`."""
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
        for work in wanted:
            if time.monotonic() > ends_s:
                problems.append(f"no time was left for {work.name}")
                continue
            found = result.setdefault(work.name, {})
            for number in range(-1, rounds):  # the first one warms up
                for (engine, mode), server in servers.items():
                    rate = server.tokens_per_s(work if number >= 0 else work._replace(num_tokens=WARM_UP_TOKENS))
                    if number >= 0:
                        found.setdefault(engine, {}).setdefault(mode, []).append(rate)
                    progress(f"{work.name}, round {number}: {engine} {mode} {rate:.0f} tokens/s")
            kept.write(result)
    return problems


class Kept:
    """The figures of earlier runs with the same settings."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            found = json.loads(self._path.read_text())
        return found

    def write(self, result: dict[str, Any]) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(result, indent=1))


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
    parser.add_argument("--only", nargs="+", default=[""], help="words of the works that are measured")
    parser.add_argument("--minutes", type=float, default=60.0, help="no work begins after so long")
    parser.add_argument("--kept", type=Path, help="file of figures of earlier runs, which are not measured again")
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
    kept, ends_s = Kept(args.kept), time.monotonic() + args.minutes * 60
    result = kept.read()
    wanted = [work for work in works(args.tokens, args.only) if not result.get(work.name, {}).keys() >= {*args.engines}]
    try:
        if wanted:
            problems += measure(args.engines, args.rounds, wanted, result, kept, ends_s)
    except SystemExit:  # what was measured until the signal counts
        problems.append("ended by a signal")
    columns = ["tokens/s", *(f"{engine} {what}" for engine in args.engines for what in (OFF, ON, "times"))]
    rows = table(result, args.engines)
    emit("speculation_peers", columns, rows, {"rates": result, "problems": problems})
    if not rows or any(cell is None for row in rows for cell in row[1:4]):
        raise SystemExit(f"a figure of {OURS} is missing: {problems}")


if __name__ == "__main__":
    main()
