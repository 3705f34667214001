"""Compares `pagemill bench` with guidellm: the same prompts and lengths, the same server, runs in turn.

Installs guidellm (PyPI) into an environment of its own. By default both measure guidellm's own mock server, which
answers at set times, so that the true values are known and do not depend on what the clients cost; `--url` measures a
server of yours instead. Exits with 1 if a mean differs by more than `--tolerance`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peers import install
from peers.process import PeerProcess
from report import ROOT, emit, progress

from pagemill.bench.texts import words

GUIDELLM = "guidellm==0.8.1"
ENVIRONMENT = {
    # One worker process: on two cores ten of them need minutes to import what they never use.
    "GUIDELLM__MAX_WORKER_PROCESSES": "1",
    "HF_HUB_OFFLINE": "1",
}
PROMPT_WORDS = 50
START_TIMEOUT_S = 300.0
NAMES = {
    "ttft_ms": "time to first token, ms",
    "tpot_ms": "time per output token, ms",
    "e2e_ms": "whole answer, ms",
    "requests_per_s": "requests per second",
}


class Outcome(NamedTuple):
    figures: dict[str, float]
    cpu_s: float
    """CPU seconds of all processes of the client, from its start to its end."""


def main() -> None:
    args = _arguments()
    install.install(args.uv, "guidellm", [GUIDELLM])
    with tempfile.TemporaryDirectory() as folder:
        server = None if args.url else _mock_server(Path(folder), args)
        try:
            url = args.url or _wait(server)
            runs: dict[str, list[Outcome]] = {"pagemill": [], "guidellm": []}
            for number in range(args.runs):
                texts = [words(f"{number}:{each}", PROMPT_WORDS) for each in range(args.requests)]
                for name, measure in (("pagemill", _pagemill), ("guidellm", _guidellm)):
                    progress(f"run {number + 1} of {args.runs}: {name}")
                    runs[name].append(measure(url, Path(folder), texts, args))
        finally:
            if server is not None:
                server[0].stop()
    report(runs, args)


def report(runs: dict[str, list[Outcome]], args: argparse.Namespace) -> None:
    """Print both tools' figures and their ratios, and exit with 1 if one is beyond the tolerance."""
    rows, ratios = [], {}
    for key, title in NAMES.items():
        ours, theirs = (median_of(runs[name], key) for name in ("pagemill", "guidellm"))
        ratios[key] = ours / theirs
        rows.append([title, ours, theirs, f"{ratios[key]:.3f}"])
    cpu = {
        name: statistics.median(each.cpu_s for each in outcomes) * 1000 / args.requests
        for name, outcomes in runs.items()
    }
    rows.append(["CPU ms of the whole command per request", cpu["pagemill"], cpu["guidellm"], ""])
    own = median_of(runs["pagemill"], "client_cpu_ms_per_request")
    rows.append(["CPU ms of measuring per request", own, "", ""])
    about = {"requests": args.requests, "clients": args.clients, "output_tokens": args.output_tokens}
    details = {name: [each._asdict() for each in outcomes] for name, outcomes in runs.items()}
    columns = ["medians of the runs' means", "pagemill bench", "guidellm", "ratio"]
    emit("beside_guidellm", columns, rows, {"ratios": ratios, "runs": details, **about})
    beyond = {key: ratio for key, ratio in ratios.items() if abs(ratio - 1) > args.tolerance}
    if beyond:
        raise SystemExit(f"beyond {args.tolerance:.0%}: {beyond}")


def median_of(outcomes: Sequence[Outcome], key: str) -> float:
    return statistics.median(each.figures[key] for each in outcomes)


def guidellm_figures(found: dict[str, Any]) -> dict[str, float]:
    """Return the means of guidellm's JSON, by our names.

    Its `inter_token_latency_ms` is the time per output token after the first (our TPOT); its `time_per_output_token_ms`
    includes the first one. Its rate is a mean over time; here it is requests by the time from the first to the last.
    """
    (measured,) = found["benchmarks"]
    metrics: dict[str, dict[str, Any]] = measured["metrics"]
    requests = measured["requests"]["successful"]
    start = min(each["info"]["timings"]["request_start"] for each in requests)
    end = max(each["info"]["timings"]["request_end"] for each in requests)
    return {
        "ttft_ms": metrics["time_to_first_token_ms"]["successful"]["mean"],
        "tpot_ms": metrics["inter_token_latency_ms"]["successful"]["mean"],
        "e2e_ms": metrics["request_latency"]["successful"]["mean"] * 1000,
        "requests_per_s": len(requests) / (end - start),
    }


def pagemill_figures(found: dict[str, Any]) -> dict[str, float]:
    means = {key: found[key]["mean"] for key in ("ttft_ms", "tpot_ms", "e2e_ms")}
    return {**means, **{key: found[key] for key in ("requests_per_s", "client_cpu_ms_per_request")}}


def _pagemill(url: str, folder: Path, texts: list[str], args: argparse.Namespace) -> Outcome:
    file = _lines(folder / "pagemill.jsonl", [{"prompt": text, "max_tokens": args.output_tokens} for text in texts])
    argv = [sys.executable, "-m", "pagemill", "bench", "--url", url, "--dataset", str(file), "--max-seconds", "3600"]
    output, cpu_s = _run([*argv, "--concurrency", str(args.clients), "-o", "json"])
    return Outcome(pagemill_figures(json.loads(output.splitlines()[-1])), cpu_s)


def _guidellm(url: str, folder: Path, texts: list[str], args: argparse.Namespace) -> Outcome:
    lines = [{"prompt": text, "output_tokens_count": args.output_tokens} for text in texts]
    file, saved = _lines(folder / "guidellm.jsonl", lines), folder / "guidellm.json"
    backend = f"kind=openai_http,target={url},request_format=/v1/chat/completions"
    argv = [_program(), "run", "--backend", backend, "--data", f"kind=json_file,path={file}", "--disable-progress"]
    argv += ["--profile", f"kind=concurrent,streams={args.clients}"]
    argv += ["--constraint", f"kind=max_requests,count={len(texts)}", "--output", f"kind=json,path={saved}"]
    _, cpu_s = _run(argv)
    figures = guidellm_figures(json.loads(saved.read_text()))
    saved.unlink()
    return Outcome(figures, cpu_s)


def _run(argv: list[str]) -> tuple[str, float]:
    """Run a client to its end; return its output, and the CPU seconds of it and its ended children."""
    with tempfile.TemporaryFile("w+") as output:
        actions = [(os.POSIX_SPAWN_DUP2, output.fileno(), 1)]
        pid = os.posix_spawn(argv[0], argv, {**os.environ, **ENVIRONMENT}, file_actions=actions)
        _, status, used = os.wait4(pid, 0)
        output.seek(0)
        text = output.read()
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"`{' '.join(argv)}` failed: {text[-2000:]}")
    return text, used.ru_utime + used.ru_stime


def _mock_server(folder: Path, args: argparse.Namespace) -> tuple[PeerProcess, str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [_program(), "mock-server", "--port", str(port), "--output-tokens", str(args.output_tokens)]
    argv += ["--ttft-ms", str(args.ttft_ms), "--itl-ms", str(args.itl_ms)]
    return PeerProcess(argv, ENVIRONMENT, folder / "server.log"), f"http://127.0.0.1:{port}"


def _wait(server: tuple[PeerProcess, str] | None) -> str:
    assert server is not None
    server[0].wait_http(f"{server[1]}/v1/models", START_TIMEOUT_S)
    return server[1]


def _program() -> str:
    return str(install.environment("guidellm") / "bin" / "guidellm")


def _lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="measure this server instead of guidellm's mock server")
    parser.add_argument("--runs", type=int, default=3, help="runs of each tool, in turn; the median counts")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--ttft-ms", type=float, default=200.0, help="the mock server's time to first token")
    parser.add_argument("--itl-ms", type=float, default=20.0, help="the mock server's time between tokens")
    parser.add_argument("--tolerance", type=float, default=0.03, help="largest difference as a share")
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    return parser.parse_args()


if __name__ == "__main__":
    main()
