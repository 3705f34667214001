# /// script
# dependencies = ["text-generation==0.7.0"]
# ///
"""Hugging Face's client of text-generation-inference, on /, /generate_stream and /info."""

from __future__ import annotations

import json
from typing import Any

import requests
from checks import CITY_SCHEMA, QUESTION, TEXT_TOKENS, City, base_url, check, report_all
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError
from text_generation.types import Grammar, GrammarType

URL = base_url().removesuffix("/v1")
client = Client(URL, timeout=60)
ASK: dict[str, Any] = {"max_new_tokens": TEXT_TOKENS}


@check("`generate`, with tokens, `prefill` and `top_n_tokens`")
def generate() -> None:
    answer = client.generate(QUESTION, decoder_input_details=True, top_n_tokens=2, **ASK)
    details = answer.details
    assert details.generated_tokens == len(details.tokens) <= TEXT_TOKENS
    assert details.prefill[0].logprob is None
    assert all(each.logprob is not None for each in details.prefill[1:])
    assert [len(each) for each in details.top_tokens or []] == [2] * len(details.tokens)
    assert "".join(each.text for each in details.tokens if not each.special) == answer.generated_text
    assert client.generate(QUESTION, return_full_text=True, **ASK).generated_text == QUESTION + answer.generated_text


@check("`generate_stream`")
def stream() -> None:
    *before, last = client.generate_stream(QUESTION, **ASK)
    assert all(each.generated_text is None and each.details is None for each in before)
    assert last.details.generated_tokens == len(before) + 1
    text = "".join(each.token.text for each in [*before, last] if not each.token.special)
    assert text == last.generated_text == client.generate(QUESTION, **ASK).generated_text


@check("sampling with a seed, and stop sequences")
def sampling() -> None:
    ask = {**ASK, "do_sample": True, "temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": 7}
    first = client.generate(QUESTION, **ask)
    assert first.details.seed == 7
    assert client.generate(QUESTION, **ask).generated_text == first.generated_text
    word = client.generate(QUESTION, **ASK).generated_text.split()[1]
    stopped = client.generate(QUESTION, stop_sequences=[word], **ASK)
    assert stopped.details.finish_reason == "stop_sequence"
    assert stopped.generated_text.endswith(word)


@check("`grammar` with a JSON schema and a regular expression")
def grammar() -> None:
    held = Grammar(type=GrammarType.Json, value=CITY_SCHEMA)
    City.model_validate(json.loads(client.generate(QUESTION, max_new_tokens=100, grammar=held).generated_text))
    digits = Grammar(type=GrammarType.Regex, value="[0-9]{3}")
    assert client.generate(QUESTION, grammar=digits, **ASK).generated_text.isdigit()


@check("the asynchronous client")
async def asynchronous() -> None:
    other = AsyncClient(URL, timeout=60)
    answer = await other.generate(QUESTION, **ASK)
    streamed = [each async for each in other.generate_stream(QUESTION, **ASK)]
    assert streamed[-1].generated_text == answer.generated_text


@check("errors raise the client's exceptions; `/info`")
def errors() -> None:
    message = ""
    try:
        client.generate(QUESTION, typical_p=0.5)
    except ValidationError as error:
        message = str(error)
    assert "typical_p" in message
    assert requests.get(f"{URL}/info", timeout=10).json()["max_total_tokens"] == 4096


if __name__ == "__main__":
    report_all()
