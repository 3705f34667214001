"""Measures embeddings per second compared with sentence-transformers, with the same data type, weights and texts.

The models have random weights: an encoder of MiniLM's shape (6 layers, 384 wide) and, with `--shapes`, one of BERT's
(12 layers, 768 wide); each call has 64 texts. Each engine has a process of its own, both are measured alternately, and
the ratio is that of the CPU times of each pair, so other work on the machine does not count. The largest difference
between their vectors is printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from peers import sentence_transformers as peer
from report import ROOT, emit

sys.path.insert(0, str(ROOT / "tests" / "shared"))  # for `encoder_models`
THREADS = 2
SHAPES: dict[str, dict[str, int]] = {
    "minilm-l6": {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
    "bert-base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
}
LENGTHS = {"mixed": (8, 256), "short": (8, 32), "equal": (128, 128)}
Encode = Callable[[list[str]], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["minilm-l6"], choices=SHAPES)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--lengths", nargs="*", default=list(LENGTHS), choices=LENGTHS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    parser.add_argument("--worker", choices=["pagemill", "sentence-transformers"])
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.folder, arguments.dtype)
        return
    peer.install_into(arguments.uv)
    rows, figures = [], {}
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            write(shape, Path(folder))
            for lengths in arguments.lengths:
                found = compare(folder, arguments.dtype, texts_of(arguments.texts, *LENGTHS[lengths]), arguments.rounds)
                figures[f"{shape} {lengths}"] = found
                shown = [found[key] for key in ("pagemill", "sentence-transformers", "ratio", "difference")]
                rows.append([f"{shape}, {lengths}", *shown])
    emit("embeddings", ["", "pagemill, texts/CPU s", "sentence-transformers", "ratio", "difference"], rows, figures)


def write(shape: str, folder: Path) -> None:
    from encoder_models import write_encoder, write_modules, write_wordpiece

    write_encoder("BertModel", {**SHAPES[shape], "vocab_size": 30_522, "max_position_embeddings": 512}, folder)
    write_modules(folder, "mean")
    write_wordpiece(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 512}))


def texts_of(number: int, least: int, most: int) -> list[str]:
    """Return texts of words that are one token each; the tokenizer adds two more tokens."""
    draw = random.Random(3)
    words = ["paris", "berlin", "is", "the", "capital", "of", "france", "germany", "cats", "sleep"]
    counts = [draw.randint(least, most) - 2 for _ in range(number)]
    return [" ".join(draw.choice(words) for _ in range(count)) for count in counts]


def compare(folder: str, dtype: str, texts: list[str], rounds: int) -> dict[str, Any]:
    names = ["pagemill", "sentence-transformers"]
    workers = {name: start(name, folder, dtype) for name in names}
    try:
        vectors = {name: ask(worker, texts)["vectors"] for name, worker in workers.items()}  # this call warms up
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds):
            for name in names if turn % 2 else reversed(names):
                seconds[name].append(ask(workers[name], texts)["cpu_s"])
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    pairs = zip(seconds["sentence-transformers"], seconds["pagemill"], strict=True)
    flat = [[value for row in vectors[name] for value in row] for name in names]
    return {
        **{name: round(len(texts) / median(seconds[name]), 1) for name in names},
        "ratio": round(median(theirs / ours for theirs, ours in pairs), 2),
        "difference": f"{max(abs(one - other) for one, other in zip(*flat, strict=True)):.1e}",
        "cpu_s": seconds,
    }


def start(name: str, folder: str, dtype: str) -> subprocess.Popen[str]:
    paths = [str(ROOT / "bench"), *([str(peer.LIBRARY)] if name != "pagemill" else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, str(ROOT / "bench" / "embeddings.py"), "--worker", name, "--folder", folder]
    argv += ["--dtype", dtype]
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )


def ask(worker: subprocess.Popen[str], texts: list[str]) -> dict[str, Any]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(texts) + "\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise SystemExit(f"a worker ended: {worker.args!r}")


def work(name: str, folder: str, dtype: str) -> None:
    """Encode the texts of each line of stdin."""
    encode = pagemill(folder, dtype) if name == "pagemill" else peer.load(folder, THREADS, dtype)
    for line in sys.stdin:
        texts = json.loads(line)
        before_s = time.process_time()
        vectors = encode(texts)
        cpu_s = time.process_time() - before_s
        print(json.dumps({"cpu_s": cpu_s, "vectors": [[float(value) for value in row] for row in vectors]}), flush=True)


def pagemill(folder: str, dtype: str) -> Encode:
    from pagemill import LLM

    llm = LLM(folder, dtype=dtype, num_threads=THREADS)
    return lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


if __name__ == "__main__":
    main()
