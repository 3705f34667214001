"""Chats name where their prompts are likely to be continued differently, for models that keep states."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pagemill_api.openai import prepare
from pagemill_api.openai.schemas import ChatCompletionRequest, CompletionRequest
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.request.generate import GenerateRequest

SYSTEM = {"role": "system", "content": "You answer in one word. Nothing else is said."}
ANSWER = {"role": "assistant", "content": "Paris"}
DROPS = (
    "{% set last = namespace(at=0) %}"
    "{% for each in messages %}{% if each.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for each in messages %}<|im_start|>{{ each.role }}\n"
    "{% if each.reasoning_content and loop.index0 > last.at %}"
    "<think>\n{{ each.reasoning_content }}\n</think>\n\n{% endif %}{{ each.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def recurrent(smollm2: Tokenizer) -> Tokenizer:
    return Tokenizer(msgspec.structs.replace(smollm2.bundle, has_states=True))


def chat(tokenizer: Tokenizer, *messages: dict[str, Any]) -> GenerateRequest:
    request = ChatCompletionRequest.model_validate({"model": "m", "messages": list(messages)})
    return prepare.prepare_chat(request, tokenizer, max_model_len=2000, request_id="chatcmpl-1", created_unix_s=7)


def ask(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_points_are_the_end_of_the_system_text_and_of_the_messages(recurrent: Tokenizer) -> None:
    first = chat(recurrent, SYSTEM, ask("The capital of France?"))
    shared, history = first.reuse_points
    assert recurrent.decode(first.prompt_token_ids[history:], skip_special_tokens=False) == "\n<|im_start|>assistant\n"

    other = chat(recurrent, SYSTEM, ask("Which colour has the sky?"))
    assert other.reuse_points[0] == shared
    assert other.prompt_token_ids[:shared] == first.prompt_token_ids[:shared]
    assert SYSTEM["content"] in recurrent.decode(first.prompt_token_ids[:shared])
    assert other.prompt_token_ids[: shared + 3] != first.prompt_token_ids[: shared + 3]

    turn = chat(recurrent, SYSTEM, ask("The capital of France?"), ANSWER, ask("And of Spain?"))
    assert turn.prompt_token_ids[:history] == first.prompt_token_ids[:history]
    assert turn.reuse_points[0] == shared
    assert turn.reuse_points[1] > history


def test_a_template_that_drops_earlier_reasoning_shares_what_is_before_the_point(smollm2: Tokenizer) -> None:
    """Over a chat of ten turns, whose reasoning the template keeps behind the last question only, as Qwen3.5's does."""
    tokenizer = Tokenizer(msgspec.structs.replace(smollm2.bundle, has_states=True, chat_template=DROPS))
    messages, hits, shared = [SYSTEM], 0, 0
    before: list[int] = []
    kept = 0
    for turn in range(10):
        messages.append(ask(f"Question {turn} of the chat: what comes next?"))
        request = chat(tokenizer, *messages)
        prompt = request.prompt_token_ids
        assert tokenizer.decode(prompt, skip_special_tokens=False).endswith("assistant\n<think>\n")
        common = next((at for at, pair in enumerate(zip(before, prompt, strict=False)) if pair[0] != pair[1]), 0)
        assert common - 15 <= kept <= common
        hits, shared = hits + kept // 16 * 16, shared + common // 16 * 16
        answer = f"It is the number {turn}, and nothing else."
        thought = tokenizer.encode(
            f"The user asks for {turn}.\n</think>\n\n{answer}<|im_end|>\n", add_special_tokens=False
        )
        before, kept = [*prompt, *thought], request.reuse_points[-1]
        messages.append({**ANSWER, "content": answer, "reasoning_content": f"The user asks for {turn}."})
    assert shared > 1000
    assert hits >= 0.95 * shared


def test_texts_that_look_like_control_tokens_give_no_wrong_points(recurrent: Tokenizer) -> None:
    for text in ("<|im_end|>", "a<|im_start|>b<|im_end|>", "", "   ", "system", "You answer in one word."):
        request = chat(recurrent, SYSTEM, ask(text))
        assert all(0 < point < len(request.prompt_token_ids) for point in request.reuse_points)
        assert request.reuse_points == sorted(set(request.reuse_points))


def test_models_without_states_get_none(smollm2: Tokenizer) -> None:
    assert chat(smollm2, SYSTEM, ask("The capital of France?")).reuse_points == []


def test_a_prompt_that_is_no_chat_names_its_end(recurrent: Tokenizer, smollm2: Tokenizer) -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": ["The capital of France is", "a"]})
    options: dict[str, Any] = {"max_model_len": 2000, "request_id": "cmpl-1", "created_unix_s": 7}
    requests = prepare.prepare_completions(body, recurrent, **options)
    assert [each.reuse_points for each in requests] == [[len(requests[0].prompt_token_ids) - 1], []]
    assert not any(each.reuse_points for each in prepare.prepare_completions(body, smollm2, **options))
