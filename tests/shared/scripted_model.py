"""A small Llama whose answers are given texts: the first until a tool's result is there, the second after one result,
and so on.

Agents that are run against the real engine need a model that calls their tools. This one attends to nothing: each token
of an answer leads to the next one, whatever the prompt is, and whatever the temperature is. The chat template, in
Qwen2.5's form, ends its prompts with a token for the number of results, which leads to the first token of that answer.
The tokenizer is that of the embedded model, so that a prompt has the usual number of tokens; the tokens of the answers
are added to it, without merges, so that no prompt has them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

from pagemill.commands.serve import DEFAULT_MODEL
from pagemill_models.sources import resolve_source
from pagemill_models.tokenizer_files.load_bundle import load_bundle

CONTEXT = 32_768
END = "<|im_end|>"
PIECE_CHARS = 6
"""Least length of an answer's tokens, in characters."""
SHARPNESS = 50.0
"""Factor of the logits: at temperature 1, all tokens but the next one have practically no probability."""
HIDDEN, INNER, HEADS, KV_HEADS = 64, 32, 2, 1
LAYER = "model.layers.0."
CHAT_TEMPLATE = """\
{%- set counted = namespace(results=0) -%}
<|im_start|>system
{%- for message in messages if message.role in ('system', 'developer') %}
{{ message.content }}
{%- endfor %}
{%- if tools %}
# Tools

Function signatures are within <tools></tools> XML tags:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

For each function call, write the name and the arguments as JSON within <tool_call></tool_call> XML tags.
{%- endif %}<|im_end|>
{%- for message in messages if message.role not in ('system', 'developer') %}
{%- if message.role == 'tool' %}
{%- set counted.results = counted.results + 1 %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{%- else %}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% if counted.results < NUM_ANSWERS %}<|answer_{{ counted.results }}|>{% else %}<|answer_LAST|>{% endif %}
{%- endif %}"""


def call(name: str, **arguments: Any) -> str:
    """Return a call as the model writes it."""
    return written_call(name, json.dumps(arguments))


def written_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def write_scripted_model(folder: Path, answers: Sequence[str], context: int = CONTEXT) -> None:
    """Write a checkpoint that answers with `answers[n]` when a conversation has n results of tools; else with the last
    one.
    """
    bundle = load_bundle(resolve_source(DEFAULT_MODEL))
    tokenizer = json.loads(bundle.tokenizer_json)
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    successors: dict[int, int] = {}
    for number, answer in enumerate(answers):
        tokens = [f"<|answer_{number}|>", *pieces(answer, vocabulary)]
        ids = [vocabulary.setdefault(token, len(vocabulary)) for token in tokens]
        successors |= dict(zip(ids, [*ids[1:], vocabulary[END]], strict=True))
        tokenizer["added_tokens"].append(special_token(ids[0], tokens[0]))
    template = CHAT_TEMPLATE.replace("NUM_ANSWERS", str(len(answers))).replace("LAST", str(len(answers) - 1))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": template}))
    (folder / "config.json").write_text(json.dumps(config(len(vocabulary), vocabulary[END], context)))
    save_file(tensors(len(vocabulary), successors), folder / "model.safetensors")


def pieces(answer: str, taken: Collection[str]) -> list[str]:
    """Return the answer as tokens that are not `taken`, and of which no two are equal."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = "".join(text for text, _ in pre_tokenizer.pre_tokenize_str(answer))
    found: list[str] = []
    start = end = 0
    while start < len(letters):
        end = min(end + 1, len(letters)) if end > start else start + PIECE_CHARS
        piece = letters[start:end]
        if piece not in taken and piece not in found:
            found.append(piece)
            start = end
        elif end >= len(letters):  # the rest is part of the token before it
            if not found:
                raise ValueError(f"The answer is a token of the vocabulary, or another answer; change it: {answer!r}.")
            start -= len(found.pop())
            end = len(letters) - 1
    return found


def special_token(token_id: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, "special": True, **flags}


def config(vocab_size: int, eos: int, context: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": eos,
        "eos_token_id": eos,
    }


def tensors(vocab_size: int, successors: dict[int, int]) -> dict[str, np.ndarray[Any, Any]]:
    """Return weights with which each token of an answer leads to the next one, and all others to any.

    Attention and feed-forward add zeros. Tokens have directions that are drawn, so that two of them are nearly
    orthogonal, and the output has the direction of the token before.
    """
    directions = np.random.default_rng(0).standard_normal((len(successors), HIDDEN)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    embedding, head = (np.zeros((vocab_size, HIDDEN), np.float32) for _ in range(2))
    for (before, after), direction in zip(successors.items(), directions, strict=True):
        embedding[before] = direction
        head[after] += SHARPNESS * direction
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    norms = ("model.norm", f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm")
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        **{f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms},
        **{f"{LAYER}{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()},
    }
