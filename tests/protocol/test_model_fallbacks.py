"""What a model's files lack is replaced by the right value, or a warning names the key: never silently by another."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from special_tokens import with_special_tokens

from pagemill_api.text.byte_level import BYTE_OF_CHAR
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_api.text.turn_end import undeclared_turn_end, warn_of_turn_end
from pagemill_models.tokenizer_files.load_bundle import load_bundle

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMELESS = CHATML.replace("im_end", "turn_end")
"""A template whose end of turns is in no list of known ends."""
CHANNELS = CHATML.replace("im_end", "end") + "{# <|channel|> #}"


def metadata(**changes: Any) -> dict[str, Any]:
    """Return a byte-level vocabulary with control tokens; `None` as a value leaves a key out."""
    extra = ["<|bos|>", "<|im_end|>", "<|turn_end|>", "<pad>", "</s>"]
    tokens = [*sorted(BYTE_OF_CHAR), *extra]
    found = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [1] * 256 + [3] * len(extra),
        "merges": ["1 2"],
        "pre": "gpt-2",
        "bos_token_id": 256,
        "eos_token_id": 257,
        "padding_token_id": 259,
        **changes,
    }
    found["tokens"] = [*found["tokens"], "12"]
    if found["token_type"] is not None:
        found["token_type"] = [*found["token_type"], 1]
    return {f"tokenizer.ggml.{name}": value for name, value in found.items() if value is not None}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("architecture", "pre"), [("qwen2", "qwen2"), ("starcoder2", "starcoder"), ("falcon", "falcon"), ("gpt2", "gpt-2")]
)
def test_a_missing_pre_tokenizer_follows_from_architectures_that_have_one(
    write_gguf: Any, caplog: pytest.LogCaptureFixture, architecture: str, pre: str
) -> None:
    absent = load_bundle(write_gguf(metadata(pre=None), architecture=architecture))
    named = load_bundle(write_gguf(metadata(pre=pre), architecture=architecture))
    assert absent.tokenizer_json == named.tokenizer_json
    assert warnings_of(caplog) == []


def test_any_other_missing_pre_tokenizer_is_named_by_a_warning(
    write_gguf: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(metadata(pre=None))
    absent = [load_bundle(path) for _ in range(2)]
    (warning,) = warnings_of(caplog)
    assert "`tokenizer.ggml.pre`" in warning
    assert absent[0].tokenizer_json == load_bundle(write_gguf(metadata(pre="gpt-2"))).tokenizer_json


def test_without_types_of_tokens_control_tokens_are_still_tokens_and_a_warning_names_the_key(
    write_gguf: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = load_bundle(write_gguf(metadata(token_type=None)))
    tokenizer = Tokenizer(bundle)
    assert tokenizer.encode("<|im_end|><|turn_end|><pad>") == [257, 258, 259]
    assert len(tokenizer.encode("</s>")) == 4, "not named and not of this form: text"
    assert bundle.eos_token_ids == [257]
    (warning,) = warnings_of(caplog)
    assert "`tokenizer.ggml.token_type`" in warning


def test_a_model_of_chats_without_an_end_is_named_by_a_warning(
    write_gguf: Any, caplog: pytest.LogCaptureFixture
) -> None:
    values = metadata(eos_token_id=None, tokens=[*sorted(BYTE_OF_CHAR), "<|bos|>", "a1", "a2", "<pad>", "a3"])
    assert load_bundle(write_gguf(values)).eos_token_ids == []
    assert warnings_of(caplog) == [], "a model without chats completes texts"
    load_bundle(write_gguf({**values, "tokenizer.chat_template": CHATML}))
    (warning,) = warnings_of(caplog)
    assert "`tokenizer.ggml.eos_token_id`" in warning


@pytest.mark.parametrize(
    ("template", "eos", "expected"),
    [
        (CHATML, ["<|im_end|>"], None),
        (NAMELESS, ["<|im_end|>"], "<|turn_end|>"),
        (NAMELESS, ["<|turn_end|>"], None),
        (CHANNELS, ["<|im_end|>"], None),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", [], None),
        ("{{ raise_exception('no') }}", [], None),
        (None, [], None),
    ],
)
def test_a_turns_end_that_only_the_template_names_is_found(
    byte_tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    template: str | None,
    eos: list[str],
    expected: str | None,
) -> None:
    texts = ["<|im_start|>", "<|im_end|>", "<|turn_end|>", "<|end|>"]
    bundle = with_special_tokens(byte_tokenizer, texts).bundle
    ids = [256 + texts.index(each) for each in eos]
    tokenizer = Tokenizer(msgspec.structs.replace(bundle, chat_template=template, eos_token_ids=ids))
    try:
        assert undeclared_turn_end(tokenizer) == expected
        warn_of_turn_end(tokenizer)
    finally:
        tokenizer.close()
    assert len(warnings_of(caplog)) == (expected is not None)
    assert all("<|turn_end|> (token 258)" in each and "eot_token_id" in each for each in warnings_of(caplog))
