"""The requests of the load: different chats with an exact number of tokens after rendering the model's template.

Each one begins with a number that the generator replaces, so that caches and prefix trees do not contain it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from report import ROOT
from workload import MODEL as SOURCE

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_models.sources import resolve_source
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.tokenizer_bundle import TokenizerBundle
from routers.generator import NONCE

TEXT = ROOT / "bench" / "quality.txt"
NUM_BODIES = 256


def bundle() -> TokenizerBundle:
    """Return the tokenizer bundle of the pods' model."""
    return load_bundle(resolve_source(SOURCE))


def write_bodies(path: Path, model: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
    """Write a JSON list of bodies of streamed chats."""
    tokenizer = Tokenizer(bundle())
    try:
        empty = tokenizer.render_chat([{"role": "user", "content": ""}])
        room = num_prompt_tokens - len(tokenizer.encode(empty, add_special_tokens=False))
        draw, words = random.Random(1), TEXT.read_text().split()
        texts = [_text(tokenizer, draw, words, room) for _ in range(NUM_BODIES)]
    finally:
        tokenizer.close()
    bodies = [_body(model, text, num_output_tokens) for text in texts]
    path.write_text(json.dumps(bodies))


def _text(tokenizer: Tokenizer, draw: random.Random, words: list[str], num_tokens: int) -> str:
    """Return the placeholder followed by random words, as many as fit."""
    text = NONCE.decode()
    while True:
        start = draw.randrange(len(words) - 8)
        for word in words[start : start + 8]:
            longer = f"{text} {word}"
            if len(tokenizer.encode(longer, add_special_tokens=False)) > num_tokens:
                return text
            text = longer


def _body(model: str, text: str, num_output_tokens: int) -> str:
    message = {"role": "user", "content": text}
    fields = {"model": model, "messages": [message], "max_tokens": num_output_tokens, "temperature": 0.7}
    return json.dumps({**fields, "stream": True})
