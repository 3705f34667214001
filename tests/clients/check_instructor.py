# /// script
# dependencies = ["instructor==1.17.0"]
# ///
"""Instructor, over OpenAI's client."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from checks import JSON_QUESTION, KEY, MAX_TOKENS, MODEL, QUESTION, City, base_url, check, report_all, run_howto
from instructor import Mode

ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": MAX_TOKENS,
    "temperature": 0,
    "max_retries": 1,
}


def client(mode: Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=base_url(), api_key=KEY, max_retries=0), mode=mode)


@check("the example of the how-to guide")
def howto() -> None:
    assert run_howto("Instructor")["answer"].name


@check("mode `TOOLS`")
def tools() -> None:
    assert isinstance(client(Mode.TOOLS).create(**ASK, response_model=City), City)


@check("mode `TOOLS_STRICT`")
def tools_strict() -> None:
    assert isinstance(client(Mode.TOOLS_STRICT).create(**ASK, response_model=City), City)


@check("mode `JSON_SCHEMA`")
def json_schema() -> None:
    assert isinstance(client(Mode.JSON_SCHEMA).create(**ASK, response_model=City), City)


@check("mode `JSON`")
def json_object() -> None:
    ask = {**ASK, "messages": [{"role": "user", "content": JSON_QUESTION}]}
    assert isinstance(client(Mode.JSON).create(**ask, response_model=City), City)


@check("a type, streamed in parts")
def partial() -> None:
    parts = list(client(Mode.JSON_SCHEMA).create_partial(**ASK, response_model=City))
    assert City.model_validate(parts[-1].model_dump())


if __name__ == "__main__":
    report_all()
