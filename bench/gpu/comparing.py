"""Pagemill beside vLLM: the same checkpoint, the same requests, one after the other on the same device.

Offline, each engine's own `LLM` generates; online, clients stream from each one's OpenAI server. Pagemill runs first,
so that its rows are there when the time ends.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import checkpoints
from case import reported
from measuring import Device
from models import CONFIGS, spec_of
from paths import HERE, ROOT, STATE
from peers.process import PeerFailed, PeerProcess
from rows import Section
from streams import stream
from workloads import Job, fixed, floor_bytes, kv_bytes, nano, output_tokens, prefill_flops, read_bytes

READY_S = 240.0
ANSWER_S = 240.0
LONGEST = 33_024
"""Longest sequence of both engines: a prompt of 32k tokens and its answer."""
SERVED = "random"
STREAMS = (64, 256)
PEER = "vLLM"
ENGINES = ("pagemill", PEER)
PEERS_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles its kernels, and does not travel
}
PERCENTILES = {"p50": 0.5, "p99": 0.99}


class Work(NamedTuple):
    shape: str
    unit: str
    jobs: list[Job]


def offline(name: str, device: Device, section: Section) -> None:
    """Measure decodes of 1, 64 and 256 requests, long prompts, and a mixed workload."""
    shape, works = ("tiny", _tiny_works()) if device.tiny else (name, _works())
    _each_engine(device, section, works, partial(_offline, shape, device, section, works))


def online(name: str, device: Device, section: Section) -> None:
    """Measure what clients see who stream from each server."""
    shape = "tiny" if device.tiny else name
    works = [Work(f"{streams} streams, 128/128", "tokens/s", _streamed(device, streams)) for streams in STREAMS]
    _each_engine(device, section, works, partial(_online, shape, device, section))


def serving(device: Device, section: Section) -> None:
    """Check that `pagemill serve` answers over HTTP: a tiny model, four streams."""
    with served("pagemill", "tiny", device) as (url, seconds):
        section.add("`pagemill serve`, tiny model, start to ready", "s", seconds)
        found = stream(url, SERVED, [(job.prompt_token_ids, 4) for job in fixed(8, 5, 4, 64)], 4)
        section.add("tokens that 4 streams get of a tiny model", "tests passed", found.num_tokens, limit=32.0)


def _works() -> list[Work]:
    return [
        *(Work(f"{num} requests, 512/128", "tokens/s", fixed(num, 512, 128, seed=num)) for num in (1, 64, 256)),
        Work("prompt of 8k", "ms", fixed(1, 8192, 1, seed=8)),
        Work("prompt of 32k", "ms", fixed(1, 32_768, 1, seed=32)),
        Work("256 requests, 100-1024 tokens each way", "tokens/s", nano()),
    ]


def _tiny_works() -> list[Work]:
    return [Work("2 requests", "tokens/s", fixed(2, 5, 2, 64)), Work("prompt of 9", "ms", fixed(1, 9, 1, 64, seed=3))]


def _streamed(device: Device, streams: int) -> list[Job]:
    return fixed(4, 5, 2, 64, seed=streams) if device.tiny else fixed(4 * streams, 128, 128, seed=streams)


def _each_engine(device: Device, section: Section, works: list[Work], run: Callable[[str], None]) -> None:
    """Run each engine whose rows an earlier run did not find; a peer that fails costs its rows only."""
    section.add("copy, bytes read and written", "GB/s", device.bytes_per_s / 1e9)
    section.add("bfloat16 matmul of 8,192 x 8,192 x 8,192", "TFLOP/s", device.flops / 1e12)
    device.release()  # what this process holds, no engine gets
    if not all(section.has(work.shape, work.unit) for work in works):
        run(ENGINES[0])
    if all(section.has(work.shape, work.unit, PEER) for work in works):
        return
    try:
        if not device.is_dry_run and importlib.util.find_spec("vllm") is None:
            raise PeerFailed("it is not importable: carry its parts (make bench-gpu-parts)")
        run(PEER)
    except Exception as problem:
        for work in works:
            if section.own(work.shape, work.unit) is not None and not _is_there(section, work):
                ours = section.own(work.shape, work.unit)
                section.add(work.shape, work.unit, ours, peer_name=PEER, error=reported(problem, 300))


def _is_there(section: Section, work: Work) -> bool:
    return any((row.shape, row.peer_name) == (work.shape, PEER) for row in section.rows)


def _offline(shape: str, device: Device, section: Section, works: list[Work], who: str) -> None:
    folder = checkpoints.written(shape)
    longest = 64 if device.tiny else LONGEST
    argv = [sys.executable, str(HERE / "workers.py"), who, str(folder), str(longest), _kind(device)]
    process = PeerProcess(argv, _environment(device, who), _log(section, who))
    try:
        process.answer(READY_S)
        _started(section, who, process)
        process.ask({"jobs": fixed(8, 5, 2, 64) if device.tiny else fixed(8, 100, 16, seed=99)}, ANSWER_S)
        for work in works:
            seconds = float(process.ask({"jobs": work.jobs}, ANSWER_S)["seconds"])
            value = output_tokens(work.jobs) / seconds if work.unit == "tokens/s" else 1000 * seconds
            _add(section, who, work, value, _limit(device, shape, work))
    finally:
        process.kill()


def _online(shape: str, device: Device, section: Section, who: str) -> None:
    with served(who, shape, device, section) as (url, _):
        warm = fixed(8, 5, 2, 64, seed=98) if device.tiny else fixed(64, 128, 32, seed=98)
        stream(url, SERVED, [(job.prompt_token_ids, job.num_output_tokens) for job in warm], len(warm))
        for streams in STREAMS:
            work = Work(f"{streams} streams, 128/128", "tokens/s", _streamed(device, streams))
            found = stream(
                url,
                SERVED,
                [(job.prompt_token_ids, job.num_output_tokens) for job in work.jobs],
                2 if device.tiny else streams,
            )
            for percentile, share in PERCENTILES.items():
                for what, times in (("first token", found.ttft_s), ("token", found.tpot_s)):
                    unit = (
                        f"ms to the first token, {percentile}" if what == "first token" else f"ms a token, {percentile}"
                    )
                    _add(section, who, Work(work.shape, unit, []), 1000 * _at(times, share), None)
            _add(section, who, work, found.num_tokens / found.seconds, _limit(device, shape, work))


@contextmanager
def served(who: str, shape: str, device: Device, section: Section | None = None) -> Iterator[tuple[str, float]]:
    """Serve a checkpoint by the engine's own command; yield its address and the seconds that its start took."""
    folder, port, control = checkpoints.written(shape), _free_port(), _free_port()
    longest = str(64 if device.tiny else 4096)
    if who == PEER:
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
        argv += ["--served-model-name", SERVED, "--dtype", "bfloat16", "--max-model-len", longest]
        ready = f"http://127.0.0.1:{port}/health"
    else:
        argv = [sys.executable, "-m", "pagemill", "serve", str(folder), "--port", str(port)]
        argv += ["--control-port", str(control), "--served-name", SERVED, "--max-model-len", longest]
        argv += ["--device", _kind(device)]
        ready = f"http://127.0.0.1:{control}/readyz"
    process = PeerProcess(argv, _environment(device, who), _log(section, who))
    try:
        process.wait_http(ready, READY_S)
        seconds = _started(section, who, process)
        yield f"http://127.0.0.1:{port}", seconds
    finally:
        process.kill()


def _started(section: Section | None, who: str, process: PeerProcess) -> float:
    seconds = time.perf_counter() - process.started_s
    if section is not None:
        _add(section, who, Work("start to ready", "s", []), seconds, None)
    return seconds


def _add(section: Section, who: str, work: Work, value: float, limit: float | None) -> None:
    if who == PEER:
        ours = section.own(work.shape, work.unit)
        section.add(work.shape, work.unit, ours, limit=limit, peer_name=PEER, peer=value)
        return
    section.add(work.shape, work.unit, value, limit=limit)


def _limit(device: Device, name: str, work: Work) -> float | None:
    """Return what bandwidth and matmul rate allow: decodes one by one, and prompts beside nothing."""
    spec, jobs = spec_of(name), work.jobs
    flops_s = sum(prefill_flops(CONFIGS[name], spec, len(job.prompt_token_ids)) for job in jobs) / device.flops
    if work.unit == "ms":
        return 1000 * flops_s
    bytes_s = floor_bytes(jobs, read_bytes(CONFIGS[name], spec, len(jobs)), kv_bytes(spec)) / device.bytes_per_s
    return output_tokens(jobs) / (bytes_s + flops_s)


def _environment(device: Device, who: str) -> dict[str, str]:
    folders = [folder for folder in sys.path if folder not in ("", str(HERE))]
    others = ("libs/kube", "libs/routing", "crds", "gateway", "operator", "simulator", "cli")
    folders += [str(ROOT / name) for name in others]
    if device.is_dry_run and who == PEER:
        folders.insert(0, str(HERE / "stand_ins" / "dry_run"))
    return {"PYTHONPATH": os.pathsep.join(folders), **PEERS_SETTINGS}


def _kind(device: Device) -> str:
    """Return the device of the engines: where there is no GPU, native kernels answer in place of them."""
    return "cuda" if device.on_gpu else "cpu"


def _log(section: Section | None, who: str) -> Path:
    folder = section.folder if section is not None and section.folder is not None else STATE
    return folder / f"{'smoke' if section is None else section.name}.{who}.log"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
