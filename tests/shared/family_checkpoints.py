"""Tiny random checkpoints of families that transformers does not have, with the names of published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB_SIZE, SIZE, INNER, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 203, 64, 96, 3, 4, 16
EPS, CONTEXT = 1e-6, 256
CONFIG: dict[str, Any] = {
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
Weights = dict[str, Tensor]


@dataclass
class Layer:
    """A layer with each matrix as [outputs, inputs] and its bias."""

    query: tuple[Tensor, Tensor | None]
    key: tuple[Tensor, Tensor | None]
    value: tuple[Tensor, Tensor | None]
    output: tuple[Tensor, Tensor | None]
    gate: Tensor
    up: Tensor
    down: Tensor
    norms: tuple[Tensor, Tensor]


@dataclass
class Kind:
    architecture: str
    config: dict[str, Any]
    shapes: Callable[[], dict[str, tuple[int, ...]]]
    layer: Callable[[Weights, int], Layer]
    around: tuple[str, str, str] = ("model.embed_tokens", "model.norm", "lm_head")
    num_kv_heads: int = NUM_HEADS
    alibi: bool = False
    normalized_head: bool = False


def llama_shapes(biased: tuple[str, ...] = (), num_kv_heads: int = NUM_HEADS) -> dict[str, tuple[int, ...]]:
    rows = {"q": SIZE, "k": num_kv_heads * HEAD_DIM, "v": num_kv_heads * HEAD_DIM, "o": SIZE}
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(NUM_LAYERS):
        for part, count in rows.items():
            shapes[f"model.layers.{i}.self_attn.{part}_proj.weight"] = (count, SIZE)
            if part in biased:
                shapes[f"model.layers.{i}.self_attn.{part}_proj.bias"] = (count,)
        shapes |= mlp_shapes(f"model.layers.{i}.mlp", "gate_proj", "up_proj", "down_proj")
        shapes |= {f"model.layers.{i}.{name}_layernorm.weight": (SIZE,) for name in ("input", "post_attention")}
    return shapes


def mlp_shapes(name: str, gate: str, up: str, down: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.{gate}.weight": (INNER, SIZE),
        f"{name}.{up}.weight": (INNER, SIZE),
        f"{name}.{down}.weight": (SIZE, INNER),
    }


def llama_layer(weights: Weights, index: int) -> Layer:
    name = f"model.layers.{index}"

    def product(part: str) -> tuple[Tensor, Tensor | None]:
        return weights[f"{name}.self_attn.{part}_proj.weight"], weights.get(f"{name}.self_attn.{part}_proj.bias")

    return Layer(
        product("q"),
        product("k"),
        product("v"),
        product("o"),
        *(weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")),
        (weights[f"{name}.input_layernorm.weight"], weights[f"{name}.post_attention_layernorm.weight"]),
    )


def baichuan_shapes() -> dict[str, tuple[int, ...]]:
    shapes = {name: shape for name, shape in llama_shapes().items() if "self_attn" not in name or "o_proj" in name}
    return shapes | {f"model.layers.{i}.self_attn.W_pack.weight": (3 * SIZE, SIZE) for i in range(NUM_LAYERS)}


def baichuan_layer(weights: Weights, index: int) -> Layer:
    name = f"model.layers.{index}.self_attn"
    parts = weights[f"{name}.W_pack.weight"].chunk(3)
    split = {f"{name}.{part}_proj.weight": matrix for part, matrix in zip("qkv", parts, strict=True)}
    return llama_layer(weights | split, index)


def internlm2_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(NUM_LAYERS):
        name = f"model.layers.{i}"
        shapes |= {f"{name}.attention.wqkv.weight": (8 * HEAD_DIM, SIZE), f"{name}.attention.wo.weight": (SIZE, SIZE)}
        shapes |= mlp_shapes(f"{name}.feed_forward", "w1", "w3", "w2")
        shapes |= {f"{name}.{which}_norm.weight": (SIZE,) for which in ("attention", "ffn")}
    return shapes


def internlm2_layer(weights: Weights, index: int) -> Layer:
    """Return a layer with two groups of two queries, a key and a value each."""
    name = f"model.layers.{index}"
    grouped = weights[f"{name}.attention.wqkv.weight"].view(2, 4, HEAD_DIM, SIZE)
    query, key, value = (grouped[:, part].reshape(-1, SIZE) for part in (slice(0, 2), 2, 3))
    return Layer(
        (query, None),
        (key, None),
        (value, None),
        (weights[f"{name}.attention.wo.weight"], None),
        *(weights[f"{name}.feed_forward.{part}.weight"] for part in ("w1", "w3", "w2")),
        (weights[f"{name}.attention_norm.weight"], weights[f"{name}.ffn_norm.weight"]),
    )


def qwen_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(NUM_LAYERS):
        name = f"transformer.h.{i}"
        shapes |= {f"{name}.attn.c_attn.weight": (3 * SIZE, SIZE), f"{name}.attn.c_attn.bias": (3 * SIZE,)}
        shapes |= {f"{name}.attn.c_proj.weight": (SIZE, SIZE)} | mlp_shapes(f"{name}.mlp", "w2", "w1", "c_proj")
        shapes |= {f"{name}.ln_{number}.weight": (SIZE,) for number in (1, 2)}
    return shapes


def qwen_layer(weights: Weights, index: int) -> Layer:
    name = f"transformer.h.{index}"
    matrices = weights[f"{name}.attn.c_attn.weight"].chunk(3)
    query, key, value = zip(matrices, weights[f"{name}.attn.c_attn.bias"].chunk(3), strict=True)
    return Layer(
        query,
        key,
        value,
        (weights[f"{name}.attn.c_proj.weight"], None),
        *(weights[f"{name}.mlp.{part}.weight"] for part in ("w2", "w1", "c_proj")),
        (weights[f"{name}.ln_1.weight"], weights[f"{name}.ln_2.weight"]),
    )


GROUPED = {"num_key_value_heads": 2}
ROTATED = {"max_position_embeddings": CONTEXT}
KINDS = {
    "aquila": Kind("AquilaModel", ROTATED, llama_shapes, llama_layer),
    "aquila2": Kind(
        "AquilaForCausalLM", ROTATED | GROUPED, lambda: llama_shapes(num_kv_heads=2), llama_layer, num_kv_heads=2
    ),
    "baichuan 7b": Kind("BaiChuanForCausalLM", ROTATED, baichuan_shapes, baichuan_layer),
    "baichuan 13b": Kind(
        "BaichuanForCausalLM", {"model_max_length": CONTEXT}, baichuan_shapes, baichuan_layer, alibi=True
    ),
    "baichuan 2": Kind("BaichuanForCausalLM", ROTATED, baichuan_shapes, baichuan_layer, normalized_head=True),
    "internlm": Kind("InternLMForCausalLM", ROTATED | {"bias": True}, lambda: llama_shapes(tuple("qkvo")), llama_layer),
    "internlm2": Kind(
        "InternLM2ForCausalLM",
        ROTATED | GROUPED | {"bias": False},
        internlm2_shapes,
        internlm2_layer,
        ("model.tok_embeddings", "model.norm", "output"),
        num_kv_heads=2,
    ),
    "internlm3": Kind(
        "InternLM3ForCausalLM",
        ROTATED | GROUPED | {"bias": False, "qkv_bias": True, "head_dim": HEAD_DIM},
        lambda: llama_shapes(tuple("qkv"), num_kv_heads=2),
        llama_layer,
        num_kv_heads=2,
    ),
    "qwen": Kind(
        "QWenLMHeadModel",
        {
            "intermediate_size": 2 * INNER,
            "layer_norm_epsilon": EPS,
            "kv_channels": HEAD_DIM,
            "seq_length": CONTEXT,
            "use_dynamic_ntk": True,
            "use_logn_attn": True,
            "no_bias": True,
        },
        qwen_shapes,
        qwen_layer,
        ("transformer.wte", "transformer.ln_f", "lm_head"),
    ),
}


def write_checkpoint(kind: Kind, folder: Path) -> Weights:
    embedding, norm, head = kind.around
    shapes = kind.shapes() | {
        f"{embedding}.weight": (VOCAB_SIZE, SIZE),
        f"{norm}.weight": (SIZE,),
        f"{head}.weight": (VOCAB_SIZE, SIZE),
    }
    torch.manual_seed(3)
    weights = {}
    for name, shape in shapes.items():
        weights[name] = torch.randn(shape) * 0.3 + (1.0 if "norm" in name or ".ln_" in name else 0.0)
    weights[f"{head}.weight"] *= 4
    save_file(weights, folder / "model.safetensors")
    config = {**CONFIG, **kind.config, "architectures": [kind.architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    return weights
