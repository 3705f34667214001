"""Compares adapters with vLLM's for CPUs: servers of both engines, with `--enable-lora` and without, in one run.

The model and its adapters are those of `lora`: the shape of a 1B Llama with repeated random bfloat16 weights, and
adapters of rank 16 on all linear layers; the vocabulary is the embedded model's, with names for the words that it
lacks. What is compared is run in turns, and all other servers are stopped meanwhile. Three parts: `decodes` of 32 rows
alone, with adapters enabled, and with 16 adapters in the batch; `loads` of adapters by vLLM's route, and first tokens
of requests alone whose adapter has a slot, is on the host, or is in its folder; `zipf`, 100 adapters on one server.
`--at` keeps the files for another run. Exits with 1 if a figure of Pagemill is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lora import ACTIVE, RANK, ROWS, VOCAB, write_adapter, write_model
from peers import http_load, pagemill, vllm_cpu, weights
from peers.catalogue import OURS, THREADS, Server
from peers.install import FOLDER, InstallFailed
from peers.metrics import percentile
from peers.process import PeerFailed, PeerProcess
from report import ROOT, emit, median, progress
from workload import MODEL, ORDINARY_TOKENS

from pagemill_models.sources import resolve_source

THEIRS = "vllm"
BASE, PROMPT, KEPT = "base", 16, 2 * ACTIVE
IN_SLOT, ON_HOST, SINGLE = range(4), range(4, 20), 6
"""Adapters whose requests find them in a slot, and on the host; others are read anew. `SINGLE`: requests of a kind."""
START_TIMEOUT_S, LOAD_TIMEOUT_S = 400.0, 120.0
SETTINGS = {"max_model_len": 512, "max_num_seqs": ROWS, "num_threads": THREADS, "enable_prefix_caching": False}
OPTIONS = ("--max-model-len", "512", "--max-num-seqs", str(ROWS), "--no-enable-prefix-caching")
LORA = {"enable_lora": True, "max_loras": ACTIVE, "max_lora_rank": RANK, "max_cpu_loras": KEPT}
LORA_OPTIONS = [
    *("--enable-lora", "--max-loras", str(ACTIVE), "--max-lora-rank", str(RANK), "--max-cpu-loras", str(KEPT)),
]
Requests = list[tuple[str, list[int], int]]
Figures = dict[str, list[float]]


def server_of(engine: str, model: Path, adapters: bool) -> Server:
    if engine == OURS:
        routes = {"enable_lora_routes": True} if adapters else {}
        return pagemill.server_with(model, BASE, {**SETTINGS, **(LORA if adapters else {})}, routes)
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return vllm_cpu.server_with(model, BASE, [*OPTIONS, *(LORA_OPTIONS if adapters else [])], variables)


class Running:
    """A server that is stopped unless it is asked."""

    def __init__(self, engine: str, model: Path, adapters: bool) -> None:
        kind = "lora" if adapters else "plain"
        self.name, self._draw, self.num_loaded = f"{engine} {kind}", random.Random(0), 0
        self._server = server_of(engine, model, adapters)
        log = FOLDER / "logs" / f"lora-{engine}-{kind}.log"
        self._process = PeerProcess(self._server.argv, self._server.environment, log)
        try:
            self._process.wait_http(self._server.ready_url, START_TIMEOUT_S)
            if (must_say := self._server.must_say) not in self._process.output():
                raise PeerFailed(f"did not say `{must_say.strip(' ,')}`: the native path fell back")
        except BaseException:  # also a signal
            self._process.kill()
            raise
        progress(f"{self.name}: ready after {time.perf_counter() - self._process.started_s:.0f} s")
        self._process.pause()

    def stop(self) -> None:
        self._process.stop()

    def requests(self, models: Sequence[str], num_tokens: int) -> Requests:
        return [(model, self._draw.sample(ORDINARY_TOKENS, PROMPT), num_tokens) for model in models]

    def send(self, models: Sequence[str], num_tokens: int) -> tuple[float, list[http_load.Answer]]:
        """Send a request for each model, at most `ROWS` at a time."""
        with self._awake():
            return http_load.send_each(self._server.url, self.requests(models, num_tokens), ROWS)

    def step_ms(self, models: Sequence[str], num_tokens: int) -> float:
        """Return the median time between tokens of requests that run together."""
        _, answers = self.send(models, num_tokens)
        return median([gap for answer in answers for gap in answer.gaps_s]) * 1000

    def load_ms(self, folder: Path) -> float:
        """Load an adapter by the route; return the time until the answer."""
        body = json.dumps({"lora_name": folder.name, "lora_path": str(folder)}).encode()
        url, headers = f"{self._server.url}/v1/load_lora_adapter", {"Content-Type": "application/json"}
        asked = urllib.request.Request(url, body, headers)
        with self._awake():
            began_s = time.perf_counter()
            urllib.request.urlopen(asked, timeout=LOAD_TIMEOUT_S).close()
            return (time.perf_counter() - began_s) * 1000

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self._process.resume()
        try:
            yield
        finally:
            self._process.pause()


def decodes(
    servers: dict[str, Running], folders: list[Path], rounds: int, steps: int, result: dict[str, Figures]
) -> None:
    """Add the times of decodes by engine: `alone`, `none` in the batch, and `active` adapters in it."""
    found: dict[str, Figures] = {engine: {"alone": [], "none": [], "active": []} for engine in engines_of(servers)}
    result |= found
    base, mixed = [BASE] * ROWS, [folders[row % ACTIVE].name for row in range(ROWS)]
    for engine in found:
        for folder in folders[:ACTIVE]:
            servers[f"{engine} lora"].load_ms(folder)
    for number in range(-1, rounds):  # the first one warms up
        for engine, figures in found.items():
            plain, lora = servers[f"{engine} plain"], servers[f"{engine} lora"]
            times = {
                "alone": plain.step_ms(base, steps),
                "none": lora.step_ms(base, steps),
                "active": lora.step_ms(mixed, steps),
            }
            progress(f"decodes, round {number}, {engine}: {shown(times)}")
            for kind, each in times.items() if number >= 0 else ():
                figures[kind].append(each)


def loads(servers: dict[str, Running], folders: list[Path], rounds: int, result: dict[str, Figures]) -> None:
    """Add times of loads by the route, and first tokens of requests alone by where the adapter is."""
    kinds = ("load", "slot", "host", "folder")
    found: dict[str, Figures] = {engine: {kind: [] for kind in kinds} for engine in engines_of(servers)}
    result |= found
    for folder in folders:
        for engine, figures in found.items():
            figures["load"].append(servers[f"{engine} lora"].load_ms(folder))
    names = [folder.name for folder in folders]
    others, position = names[ON_HOST.stop :], 0
    warm = [*(names[index] for index in ON_HOST), *(names[index] for index in IN_SLOT)]
    for number in range(rounds):
        for engine, figures in found.items():
            server = servers[f"{engine} lora"]
            for name in warm:
                server.send([name], 1)
            asked = {
                "slot": [names[IN_SLOT[turn % len(IN_SLOT)]] for turn in range(SINGLE)],
                "host": [names[ON_HOST[turn]] for turn in range(SINGLE)],
                "folder": [others[(position + turn) % len(others)] for turn in range(SINGLE)],
            }
            times = {kind: [server.send([name], 1)[1][0].ttft_s * 1000 for name in asked[kind]] for kind in asked}
            progress(f"first tokens, round {number}, {engine}: {shown({kind: median(times[kind]) for kind in times})}")
            for kind, each in times.items():
                figures[kind] += each
        position += SINGLE


def zipf(
    servers: dict[str, Running], folders: list[Path], rounds: int, num_requests: int, result: dict[str, Figures]
) -> None:
    """Add tokens/s and TTFT of requests for adapters by Zipf's law, and of as many for the model alone."""
    keys = [f"{kind} {what}" for kind in ("adapters", "base") for what in ("tokens/s", "TTFT p50", "TTFT p99")]
    found: dict[str, Figures] = {engine: {key: [] for key in keys} for engine in engines_of(servers)}
    result |= found
    shares = [1 / (place + 1) for place in range(len(folders))]
    for number in range(rounds):
        drawn = random.Random(number).choices([folder.name for folder in folders], shares, k=num_requests)
        for engine, figures in found.items():
            for kind, models in (("base", [BASE] * num_requests), ("adapters", drawn)):
                seconds, answers = servers[f"{engine} lora"].send(models, 32)
                ttfts = [answer.ttft_s * 1000 for answer in answers]
                figures[f"{kind} tokens/s"].append(sum(answer.num_tokens for answer in answers) / seconds)
                figures[f"{kind} TTFT p50"].append(percentile(ttfts, 50))
                figures[f"{kind} TTFT p99"].append(percentile(ttfts, 99))
            progress(f"zipf, round {number}, {engine}: {shown({key: figures[key][-1] for key in keys})}")


def engines_of(servers: dict[str, Running]) -> list[str]:
    return [engine for engine in (OURS, THEIRS) if f"{engine} lora" in servers]


def shown(times: dict[str, float]) -> str:
    return ", ".join(f"{kind} {each:.1f}" for kind, each in times.items())


def write_vocabulary(folder: Path) -> None:
    """Write the embedded model's tokenizer with as many words as the model has, so that servers answer with text."""
    weights.write_tokenizer(resolve_source(MODEL), folder, {"max_position_embeddings": 4096})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    known |= {f"Ġword{number}": number for number in range(len(known), VOCAB)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def write_files(at: Path, layers: int, num_adapters: int) -> tuple[Path, list[Path]]:
    """Write the model and the adapters that are not there yet; return their folders."""
    model, folders = at / f"model-{layers}", [at / f"adapter-{layers}-{index}" for index in range(num_adapters)]
    if not (model / "tokenizer.json").exists():
        model.mkdir(parents=True)
        write_model(model, layers)
        write_vocabulary(model)
    for index, folder in enumerate(folders):
        if not folder.exists():
            write_adapter(folder, layers, index)
    return model, folders


def measure(model: Path, folders: list[Path], args: argparse.Namespace, result: dict[str, Any]) -> Iterator[str]:
    """Add the figures of each part by engine; yield what failed."""
    for engines in [[engine] for engine in args.engines] if args.apart else [args.engines]:
        with ExitStack() as stack:
            servers: dict[str, Running] = {}
            for engine in engines:
                for adapters in (True, False) if "decodes" in args.parts else (True,):
                    try:
                        running = Running(engine, model, adapters)
                    except PeerFailed as failure:
                        yield f"{engine}: {failure}"
                        continue
                    stack.callback(running.stop)
                    servers[running.name] = running
            if "decodes" in args.parts:
                decodes(servers, folders, args.rounds, args.steps, result.setdefault("decodes", {}))
            if {"loads", "zipf"} & set(args.parts):
                rounds = args.rounds if "loads" in args.parts else 0
                loads(servers, folders, rounds, result.setdefault("loads", {}))
            if "zipf" in args.parts:
                zipf(servers, folders, args.rounds, args.requests, result.setdefault("zipf", {}))


def table(result: dict[str, Any]) -> list[list[Any]]:
    """Return rows of what was measured, ours, theirs, and how many times better ours is."""
    rows: list[list[Any]] = []
    for part, by_engine in result.items():
        medians = {
            engine: {key: statistics.median(values) for key, values in figures.items() if values}
            for engine, figures in by_engine.items()
        }
        for engine, found in medians.items():
            if "active" in found:
                of_pairs = {
                    key: _ratio(by_engine[engine]["alone"], by_engine[engine][key]) for key in ("none", "active")
                }
                found |= {f"speed, {key}": each for key, each in of_pairs.items()}
        for key in medians[OURS]:
            ours, theirs = (medians.get(engine, {}).get(key) for engine in (OURS, THEIRS))
            more_is_better = key.startswith("speed") or key.endswith("tokens/s")
            better = None if not ours or not theirs else ours / theirs if more_is_better else theirs / ours
            rows.append([f"{part}: {key}", ours, theirs, better])
    return rows


def _ratio(of: list[float], by: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(of, by, strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--requests", type=int, default=200, help="of one round by Zipf's law")
    parser.add_argument("--parts", nargs="+", default=["decodes", "loads", "zipf"])
    parser.add_argument("--engines", nargs="+", default=[OURS, THEIRS], choices=[OURS, THEIRS])
    parser.add_argument("--apart", action="store_true", help="one engine after the other, for machines of less memory")
    parser.add_argument("--at", type=Path, help="folder of the model and the adapters, which are written if absent")
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended
    problems: list[str] = []
    if THEIRS in args.engines:
        try:
            vllm_cpu.install_vllm(args.uv)
        except InstallFailed as failure:
            problems, args.engines = [f"{THEIRS}: {failure}"], [OURS]
    with tempfile.TemporaryDirectory() as temporary:
        num_adapters = ACTIVE if args.parts == ["decodes"] else max(args.adapters, KEPT + 2 * ACTIVE)
        model, folders = write_files(args.at or Path(temporary), args.layers, num_adapters)
        result: dict[str, Any] = {}
        try:
            problems += measure(model, folders, args, result)
        except SystemExit:  # what was measured until the signal counts
            problems.append("ended by a signal")
    rows = table(result)
    about = {"layers": args.layers, "problems": problems, "cpus": os.cpu_count(), **result}
    emit("lora_peers", ["what", OURS, THEIRS, "times better"], rows, about)
    if any(row[1] is None for row in rows):
        raise SystemExit(f"a figure of {OURS} is missing: {about['problems']}")


if __name__ == "__main__":
    main()
