"""Reads the conversations to send from a file, whose kind its first character or line determines.

Recorded traces have lengths and times without texts: `generated` makes these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagemill.bench.conversations import BenchConversation, BenchError, BenchTurn, BenchWorkload
from pagemill.bench.generated import of_requests
from pagemill.bench.texts import TextLengths, words
from pagemill_simulator.workloads.traces import TraceError, read_trace

KINDS = (
    "a JSON list of conversations as in ShareGPT, JSON lines with `messages` or `prompt`, JSON lines with "
    "`input_length`, `output_length` and `hash_ids` (Mooncake), a trace of Azure or BurstGPT, or a gateway's log"
)
BLOCK_TOKENS = 512
"""Tokens of one of Mooncake's `hash_ids`."""
LENGTHS = ("output_tokens", "max_tokens", "max_completion_tokens")
OWN_FIELDS = frozenset({"messages", "prompt", "prompts", *LENGTHS})
NOT_SENT = frozenset({"model", "stream", "stream_options", "custom_id", "method", "url", "body", "timestamp", "id"})
USERS = frozenset({"human", "user"})
MODELS = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


def read_dataset(path: Path, seed: int, sizes: TextLengths, *, speedup: float = 1.0) -> BenchWorkload:
    """Return the conversations of a file; `speedup` divides the times of a trace. Raises `BenchError`."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = next((line for line in file if line.strip()), "").strip()
            file.seek(0)
            if first.startswith("["):
                return BenchWorkload(f"{path}: conversations", list(_sharegpt(path, _json(path, 0, file.read()))))
            if first.startswith("{") and _is_request(first):
                lines = [
                    (number, _object(path, number, line)) for number, line in enumerate(file, start=1) if line.strip()
                ]
                if "hash_ids" in lines[0][1]:
                    return BenchWorkload(f"{path}: Mooncake trace", _mooncake(path, lines, sizes, speedup))
                return BenchWorkload(f"{path}: requests", [_request(path, *line) for line in lines])
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--dataset {path}: cannot be read ({error})") from error
    try:
        trace = read_trace(path, speedup=speedup)
    except TraceError as error:
        raise BenchError(f"--dataset {str(error).partition('expected')[0].rstrip(' :;')}: expected {KINDS}") from None
    return BenchWorkload(trace.source, of_requests(trace.requests, seed, sizes))


def _is_request(line: str) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return True
    return isinstance(found, dict) and "event" not in found


def _json(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BenchError(f"--dataset {_place(path, number)}: expected JSON ({error})") from None


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    found = _json(path, number, line)
    if not isinstance(found, dict):
        raise BenchError(f"--dataset {_place(path, number)}: expected a JSON object, got {str(found)[:60]}")
    return found


def _place(path: Path, number: int) -> str:
    return f"{path}:{number}" if number else str(path)


def _sharegpt(path: Path, found: Any) -> Iterator[BenchConversation]:
    """Yield the conversations that begin with a user's text and an answer; answers are as long as the recorded ones,
    by words, since the file has no tokens.
    """
    num_read = 0
    for entry in found:
        talk = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(talk, list):
            raise BenchError(f"--dataset {path}: entry {num_read + 1} has no `conversations`; expected {KINDS}")
        num_read += 1
        parts = [(str(each.get("from")).lower(), str(each.get("value") or "")) for each in talk]
        system = parts.pop(0)[1] if parts and parts[0][0] == "system" else ""
        turns = [
            BenchTurn(asked, max(1, len(answer.split()) * 4 // 3))
            for (who, asked), (answering, answer) in zip(parts[::2], parts[1::2], strict=False)
            if who in USERS and answering in MODELS and asked.strip()
        ]
        if turns:
            yield BenchConversation(turns, system)
    if not num_read:
        raise BenchError(f"--dataset {path}: holds no conversation; expected {KINDS}")


def _request(path: Path, number: int, line: dict[str, Any]) -> BenchConversation:
    """Return one line's request: a body of the API (a line of a batch too), or `prompt`/`prompts` with its output."""
    body = line["body"] if isinstance(line.get("body"), dict) else line
    output = next((body[name] for name in LENGTHS if name in body), None)
    if output is not None and (not isinstance(output, int) or output < 1):
        raise BenchError(f"--dataset {path}:{number}: expected a number of tokens from 1, got {output!r}")
    extra = {name: value for name, value in body.items() if name not in OWN_FIELDS | NOT_SENT}
    at_s = line.get("timestamp")
    begins = float(at_s) / 1000 if isinstance(at_s, int | float) else None
    messages = body.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages):
        return BenchConversation([BenchTurn("", output)], at_s=begins, messages=messages, extra=extra)
    texts = body.get("prompts", [body.get("prompt")])
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise BenchError(f"--dataset {path}:{number}: has neither `messages` nor `prompt` as text; expected {KINDS}")
    return BenchConversation([BenchTurn(text, output) for text in texts], at_s=begins, extra=extra)


def _mooncake(
    path: Path, lines: list[tuple[int, dict[str, Any]]], sizes: TextLengths, speedup: float
) -> list[BenchConversation]:
    """Return requests whose texts share what the recorded ones shared: a block's text follows from its hash."""
    conversations, block = [], sizes.num_words(BLOCK_TOKENS)
    for number, line in lines:
        try:
            at_s, hashes = float(line["timestamp"]) / 1000 / speedup, [int(each) for each in line["hash_ids"]]
            total, output = int(line["input_length"]), int(line["output_length"])
        except (KeyError, TypeError, ValueError) as error:
            raise BenchError(
                f"--dataset {path}:{number}: expected timestamp, input_length, output_length and hash_ids ({error!r})"
            ) from None
        whole = " ".join(words(f"block {each}", block) for each in hashes).split(" ")
        text = " ".join(whole[: sizes.num_words(total)])
        conversations.append(BenchConversation([BenchTurn(text, max(1, output))], at_s=at_s))
    first_s = min(each.at_s or 0.0 for each in conversations)
    return [each._replace(at_s=(each.at_s or 0.0) - first_s) for each in conversations]
