"""Compares offline throughput of the mixed workload with Hugging Face `generate` with static batching, in one run.

Every peer runs in a process of its own, one after the other, with the same weights, prompts and output lengths, greedy.
Only the requested tokens count: what a static batch generates beyond a request's length is waste. The Hugging Face peer
tries several batch sizes, and the best one counts. `--peer` runs one peer; the parent process calls it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from typing import Any

from report import emit, median, peak_rss_mib, run_peer
from workload import MODEL, Job, mixed_workload

WARM_UP = mixed_workload(8, prompt_tokens=(16, 64), output_tokens=(8, 8), seed=1)
Tokens = list[list[int]]


def pagemill(jobs: list[Job], runs: int) -> dict[str, Any]:
    """Measure Pagemill's offline API in float32, the precision that `auto` takes on this machine too."""
    from pagemill import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(model=MODEL, dtype="float32", max_model_len=512, enable_prefix_caching=False)
    load_s = time.perf_counter() - start

    def generate(some: list[Job]) -> Tokens:
        prompts = [{"prompt_token_ids": job.prompt_token_ids} for job in some]
        params = [SamplingParams(temperature=0, max_tokens=job.num_output_tokens, ignore_eos=True) for job in some]
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]

    generate(WARM_UP)
    return {"load_s": load_s, **_timed(generate, jobs, runs)}


def hugging_face(jobs: list[Job], runs: int, dtype: str, batch_sizes: list[int]) -> dict[str, Any]:
    """Measure transformers' `generate` with batches of equal size in order of arrival, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    from pagemill_models.sources import resolve_source

    path = resolve_source(MODEL)
    start = time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=getattr(torch, dtype))
    load_s = time.perf_counter() - start
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(some: list[Job], batch_size: int) -> Tokens:
        return [
            ids for at in range(0, len(some), batch_size) for ids in static_batch(model, some[at : at + batch_size])
        ]

    generate(WARM_UP, len(WARM_UP))
    tried = {size: _timed(lambda some, size=size: generate(some, size), jobs, runs) for size in batch_sizes}
    best = min(tried, key=lambda size: median(tried[size]["runs_s"]))
    return {"load_s": load_s, "batch_size": best, **tried[best]}


def static_batch(model: Any, jobs: list[Job]) -> Tokens:
    """Run one padded batch; it takes as long as its longest answer."""
    import torch

    width = max(len(job.prompt_token_ids) for job in jobs)
    padding = [[0] * (width - len(job.prompt_token_ids)) for job in jobs]
    ids = torch.tensor([pad + job.prompt_token_ids for pad, job in zip(padding, jobs, strict=True)])
    mask = torch.tensor([[0] * len(pad) + [1] * (width - len(pad)) for pad in padding])
    longest = max(job.num_output_tokens for job in jobs)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=longest, max_new_tokens=longest)
    rows: list[list[int]] = out[:, width:].tolist()
    return [row[: job.num_output_tokens] for row, job in zip(rows, jobs, strict=True)]


def _timed(generate: Any, jobs: list[Job], runs: int) -> dict[str, Any]:
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        tokens: Tokens = generate(jobs)
        seconds.append(time.perf_counter() - start)
    assert [len(each) for each in tokens] == [job.num_output_tokens for job in jobs], "every peer does the same work"
    digests = [hashlib.blake2b(json.dumps(each).encode(), digest_size=8).hexdigest() for each in tokens]
    return {"runs_s": seconds, "peak_rss_mib": peak_rss_mib(), "answers": digests}


def compare(args: argparse.Namespace) -> None:
    jobs = mixed_workload(args.requests)
    num_tokens = sum(job.num_output_tokens for job in jobs)
    results: dict[str, dict[str, Any] | str] = {}
    for name in args.peers:
        arguments = ["--peer", name, "--requests", str(args.requests), "--runs", str(args.runs)]
        arguments += ["--hf-batch-sizes", *map(str, args.hf_batch_sizes)]
        results[name] = run_peer(__file__, *arguments, timeout_s=args.timeout_s)
    speeds = {name: num_tokens / median(each["runs_s"]) for name, each in results.items() if not isinstance(each, str)}
    ours = results.get("pagemill")
    rows = [_row(name, each, num_tokens, ours, speeds) for name, each in results.items()]
    columns = ["peer", "output tok/s", "min..max s", "load s", "peak MiB", "same answers", "pagemill / peer"]
    emit("offline_throughput", columns, rows, {"requests": len(jobs), "output_tokens": num_tokens, "tok_per_s": speeds})


def _row(name: str, result: dict[str, Any] | str, num_tokens: int, ours: Any, speeds: dict[str, float]) -> list[Any]:
    if isinstance(result, str):
        return [name, result, "", "", "", "", ""]
    seconds = result["runs_s"]
    label = f"{name} (batch {result['batch_size']})" if "batch_size" in result else name
    same, ratio = "", ""
    if isinstance(ours, dict):
        equal = sum(a == b for a, b in zip(ours["answers"], result["answers"], strict=True))
        same = f"{equal}/{len(result['answers'])}"
        ratio = f"{speeds['pagemill'] / speeds[name]:.2f}x"
    spread = f"{min(seconds):.1f}..{max(seconds):.1f}"
    return [label, speeds[name], spread, result["load_s"], result["peak_rss_mib"], same, ratio]


PEERS = ["hf-bf16", "hf-float32", "pagemill"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3, help="number of runs; the median counts")
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS)
    parser.add_argument("--hf-batch-sizes", type=int, nargs="+", default=[16, 64])
    parser.add_argument(
        "--timeout-s", type=float, default=900.0, help="seconds after which a peer is stopped and reported as too slow"
    )
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer is None:
        return compare(args)
    jobs = mixed_workload(args.requests)
    if args.peer == "pagemill":
        result = pagemill(jobs, args.runs)
    elif args.peer == "hf-float32":
        result = hugging_face(jobs, args.runs, "float32", args.hf_batch_sizes)
    else:  # one run: without bfloat16 arithmetic in the CPU it takes many minutes
        result = hugging_face(jobs, 1, "bfloat16", args.hf_batch_sizes[-1:])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
