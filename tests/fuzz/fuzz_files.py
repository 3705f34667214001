"""Mutates the files of models and reads each: it loads within limits, or is refused by an error of this project.

A child process with limited memory reads, so that nothing that a file asks for harms the machine. Seeds are made here
and small; the order is that of `--seed`. A file that fails is kept below `.pagemill/fuzz`, and the program prints which
lines of the readers ran. `tests/protocol/test_mutated_models.py` tries every key of every family by a table of values.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from byte_bundle import byte_bundle
from mutated_models import FAMILIES, VALUES, config_of, gguf_bytes, gguf_metadata, write_folder

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_models.declaration.known import BUILT_IN
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.source_errors import MAX_MESSAGE_CHARS, SourceError
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".pagemill" / "fuzz"
READERS = (
    *(
        "libs/models/pagemill_models/files",
        "libs/models/pagemill_models/spec",
        "libs/models/pagemill_models/declaration",
    ),
    *("libs/models/pagemill_models/tokenizer_files", "libs/api/pagemill_api/text"),
)
MEMORY_BYTES = 2 * 1024**3
"""Address space that reading may take, in addition to what the imported libraries take."""
MAX_S = 2.0
EXTRA_S = 180.0
"""Time for imports and the report, on a busy machine."""
TRACED = 7
"""One in how many files is traced, not a multiple of the number of kinds."""
MAX_KEPT_BYTES = 1024 * 1024
TEXTS = ("banana", "a" * 60, "Hello, 世界! \n\n  12345", "\u0301" * 50, "ﷺ½ İ", " " * 300)
NUMBERS = (0, 1, -1, 255, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
PATTERNS = (
    "(?:a|a)*b",
    "a+b",
    "(",
    "[",
    "\\s+$",
    "",
    "a{1,999}",
    ".*.*b",
    "(?=a)",
    "\\p{L}+",
    "(a+)+",
    "(?<=a)b|a+?|.",
)
STEPS: tuple[dict[str, Any], ...] = (
    {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
    *({"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in PATTERNS),
    *({"type": kind} for kind in ("NFC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "ByteLevel", "Fuse")),
    {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="},
    {"type": "Prepend", "prepend": "▁"},
)


def changed(value: Any, rng: random.Random) -> Any:
    """Return JSON with one value at any depth replaced, removed or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return value | {key: changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(min(len(value), 20))
        return [*value[:at], changed(value[at], rng), *value[at:][: rng.choice((1, len(value)))]]
    return rng.choice((*VALUES, *STEPS, list(STEPS[: rng.randrange(1, 9)])))


def changed_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Return bytes of which a few in the header are replaced, cut out or repeated."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(min(len(data), 2500))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + 8] = (rng.choice(NUMBERS) % 2**64).to_bytes(8, "little")
        elif kind == 2:
            del data[at : at + rng.choice((1, 8, 100))]
        else:
            data[at:at] = data[at : at + rng.choice((1, 8, 100))]
    return bytes(data)


def attempts(folder: Path, rng: random.Random) -> Iterator[tuple[str, Path | None, Callable[[], object]]]:
    """Yield the kind of each mutated file, its path, and what reads it."""
    families, architectures = list(FAMILIES), sorted({name for known in BUILT_IN.values() for name in known.gguf})
    tokenizer = json.loads(byte_bundle().tokenizer_json) | {"added_tokens": [], "post_processor": None}
    model, file = folder / "model", folder / "model.gguf"
    model.mkdir()
    while True:
        family = rng.choice(families)
        write_folder(model, config_of(family))
        weights = model / "model.safetensors"
        num_bytes, header = weights.stat().st_size, header_of(weights)
        for _ in range(20):
            config: Any = config_of(family)
            for _ in range(rng.choice((1, 2, 3))):
                config = changed(config, rng)
            (model / "config.json").write_text(json.dumps(config))
            yield "config.json", model / "config.json", lambda: load_model_spec(model)
            (model / "config.json").write_text(json.dumps(config_of(family)))
            write_header(weights, changed_bytes(header, rng), num_bytes)
            yield "safetensors", weights, lambda: load_model_spec(model)
            write_header(weights, header, num_bytes)
            (model / "tokenizer.json").write_text(json.dumps(changed(tokenizer, rng)))
            yield "tokenizer.json", model / "tokenizer.json", lambda: tokenize(load_bundle(model))
            raw = gguf_bytes(gguf_metadata(rng.choice(architectures)) | VOCABULARY, {"token_embd.weight": (64, 64)})
            file.write_bytes(changed_bytes(raw, rng))
            yield "gguf", file, lambda: (load_model_spec(file), tokenize(load_bundle(file)))


def header_of(weights: Path) -> bytes:
    with weights.open("rb") as file:
        start = file.read(8)
        return start + file.read(int.from_bytes(start, "little"))


def write_header(weights: Path, header: bytes, num_bytes: int) -> None:
    """Write a file of that size with nothing but a header, which takes no space."""
    with weights.open("wb") as file:
        file.write(header)
        file.truncate(max(num_bytes, len(header)))


VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["a", "b", "n", "ab", "na"],
    "tokenizer.ggml.merges": ["a b", "n a"],
    "tokenizer.ggml.eos_token_id": 1,
}


def tokenize(bundle: TokenizerBundle) -> None:
    with closing(Tokenizer(bundle)) as tokenizer:
        for text in TEXTS:
            ids = tokenizer.encode_within(text, 1000)
            tokenizer.decode(ids)


class Lines:
    """Counts which lines of the readers ran. A line that ran is not traced again."""

    def __init__(self) -> None:
        self._files = {str(path) for folder in READERS for path in (ROOT / folder).rglob("*.py")}
        self._ran: dict[str, set[int]] = {file: set() for file in self._files}

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename
        if file not in self._files:
            return None
        self._ran[file].add(frame.f_lineno)
        return self._line

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self._ran[frame.f_code.co_filename].add(frame.f_lineno)
        return self._line

    def report(self) -> str:
        """Return the share of the lines inside functions that ran, by folder."""
        rows = []
        for folder in READERS:
            total = ran = 0
            for path in (ROOT / folder).rglob("*.py"):
                lines = set(_lines_of(compile(path.read_text(), str(path), "exec"), is_function=False))
                total, ran = total + len(lines), ran + len(lines & self._ran[str(path)])
            rows.append(f"  {folder:52} {ran:5} of {total:5} lines of functions ran ({ran / max(1, total):.0%})")
        return "\n".join(rows)


def _lines_of(code: CodeType, *, is_function: bool) -> Iterator[int]:
    if is_function:
        yield from (line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            is_class = "__qualname__" in constant.co_names[:3]
            yield from _lines_of(constant, is_function=not is_class)


def read_all(seed: int, count: int, seconds: float) -> int:
    """Read mutated files; return the number of those that fail."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))
    logging.disable()  # warnings about what a file leaves to be guessed
    rng, lines, outcomes, failures = random.Random(seed), Lines(), Counter[str](), 0
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number, (kind, path, read) in enumerate(attempts(Path(folder), rng)):
            if number >= count or time.monotonic() - began_s > seconds:
                break
            if number % TRACED == 0:  # tracing takes several times as long as reading
                sys.settrace(lines.trace)
            problem, outcome = _problem(read)
            sys.settrace(None)
            outcomes[f"{kind}: {outcome}"] += 1
            if problem and path is not None:
                failures += 1
                KEPT.mkdir(parents=True, exist_ok=True)
                kept = KEPT / f"{seed}-{number}-{path.name}"
                print(f"FAILED {kept.relative_to(ROOT)}: {problem}", flush=True)
                with path.open("rb") as file:
                    kept.write_bytes(file.read(min(MAX_KEPT_BYTES, path.stat().st_size)))
    took_s = time.monotonic() - began_s
    print(f"{sum(outcomes.values())} files in {took_s:.0f} s, seed {seed}; {failures} failed")
    print("\n".join(f"  {name:40} {number:6}" for name, number in sorted(outcomes.items())))
    print(lines.report())
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  peak memory {peak_mib:.0f} MiB")
    return failures


def _problem(read: Callable[[], object]) -> tuple[str, str]:
    """Return what is wrong with how a file was read, if anything, and whether it was read or refused."""
    began_s = time.thread_time()
    outcome = "read"
    try:
        read()
    except (SourceError, PagemillError) as error:
        outcome = "refused"
        if len(error.message) > MAX_MESSAGE_CHARS:
            return f"a message of {len(error.message)} characters", outcome
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {str(error)[:200]}", "failed"
    took_s = time.thread_time() - began_s
    return (f"{took_s:.1f} s", outcome) if took_s > MAX_S else ("", outcome)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return 1 if read_all(options.seed, options.count, options.seconds) else 0
    arguments = [f"--seed={options.seed}", f"--count={options.count}", f"--seconds={options.seconds}", "--child"]
    try:
        return subprocess.run([sys.executable, __file__, *arguments], timeout=options.seconds + EXTRA_S).returncode
    except subprocess.TimeoutExpired:
        print(f"FAILED: a file was not read within {options.seconds + EXTRA_S:g} s, seed {options.seed}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
