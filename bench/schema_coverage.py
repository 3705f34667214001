"""Measures which schemas of a collection can be enforced, and whether answers that they allow are valid for them.

The collection is a file with one JSON object a line: `set`, `name`, `schema`. Each schema is checked as a gateway does,
then answers are drawn at random from its grammar, byte by byte, and validated.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from report import emit

from pagemill_api.grammars.check import FormChecks
from pagemill_api.grammars.parser import parser_limits
from pagemill_api.grammars.source import grammar_text
from pagemill_api.grammars.worker import ByteTokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.structured_outputs import StructuredOutputs

SIZES = {
    "Github_easy": 1943,
    "Github_hard": 1240,
    "Github_medium": 1976,
    "Github_trivial": 444,
    "Github_ultra": 164,
    "Glaiveai2K": 1707,
    "JsonSchemaStore": 492,
    "Kubernetes": 1064,
    "Snowplow": 403,
    "WashingtonPost": 125,
}
"""Schemas in each whole set, as weights of the sample."""
MAX_BYTES = 3000
END = 256


def drawn(matcher: LLMatcher, draw: random.Random) -> str | None:
    """Return a random answer, or None for one that does not end within `MAX_BYTES`."""
    said = bytearray()
    while len(said) < MAX_BYTES:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if mask >> END & 1:
            return said.decode()
        allowed = [each for each in range(END) if mask >> each & 1]
        ends = [each for each in allowed if each in b'"}],:'] if draw.random() < 0.45 else []
        letters = [each for each in allowed if 0x61 <= each <= 0x7A]
        said.append(draw.choice(ends or letters or allowed))
        if not matcher.consume_token(said[-1]):
            raise RuntimeError("the grammar refuses a byte that its mask allows")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--answers", type=int, default=3, help="drawn for each schema")
    args = parser.parse_args()
    checks, vocabulary = FormChecks(), LLTokenizer(TokenizerWrapper(ByteTokenizer()))
    total, covered, counts = Counter[str](), Counter[str](), Counter[str]()
    for line in args.schemas.read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        total[record["set"]] += 1
        form, schema = StructuredOutputs(json_schema=json.dumps(record["schema"])), record["schema"]
        try:
            checks.check(form)
        except PagemillError as error:
            sys.stdout.write(f"{record['set']} {record['name']}: {error.message[:160]}\n")
            continue
        covered[record["set"]] += 1
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        grammar = LLMatcher(vocabulary, grammar_text(form), log_level=0, limits=parser_limits())
        for seed in range(args.answers):
            answer = drawn(grammar.deep_copy(), random.Random(seed))
            kind_of = (
                "unfinished" if answer is None else "valid" if validator.is_valid(json.loads(answer)) else "invalid"
            )
            counts[kind_of] += 1
            if kind_of == "invalid":
                sys.stdout.write(f"{record['set']} {record['name']}: invalid: {answer[:160] if answer else ''}\n")
    shares = {name: covered[name] / number for name, number in total.items()}
    weight = sum(SIZES.get(name, total[name]) for name in total)
    weighted = sum(SIZES.get(name, total[name]) * share for name, share in shares.items()) / weight
    rows = [[name, covered[name], total[name], f"{100 * share:.1f} %"] for name, share in shares.items()]
    rows.append(["by set size", covered.total(), total.total(), f"{100 * weighted:.1f} %"])
    emit("schema_coverage", ["set", "enforced", "schemas", "share"], rows, {"share": weighted, "answers": dict(counts)})
    return int(bool(counts["invalid"]))


if __name__ == "__main__":
    sys.exit(main())
