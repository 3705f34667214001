"""A tiny Llama that starts quickly, for tests in which the computed tokens do not matter.

Servers read its tokenizer and its template like any other model's: its tokens are bytes and pairs of letters. The
weights are zeros.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from itertools import product
from pathlib import Path
from string import ascii_lowercase

from byte_bundle import byte_tokenizer
from tokenizers import AddedToken

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAIRS = [*product(ascii_lowercase, ascii_lowercase)]
BOS, EOS = (256 + len(PAIRS) + SPECIAL_TOKENS.index(token) for token in ("<|im_start|>", "<|im_end|>"))
VOCAB_SIZE = 256 + len(PAIRS) + len(SPECIAL_TOKENS)
NAME = "light"
HIDDEN, INNER, KV, MAX_LENGTH = 32, 48, 16, 8192
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    f"{LAYER}input_layernorm.weight": (HIDDEN,),
    f"{LAYER}post_attention_layernorm.weight": (HIDDEN,),
    f"{LAYER}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    f"{LAYER}self_attn.k_proj.weight": (KV, HIDDEN),
    f"{LAYER}self_attn.v_proj.weight": (KV, HIDDEN),
    f"{LAYER}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    f"{LAYER}mlp.gate_proj.weight": (INNER, HIDDEN),
    f"{LAYER}mlp.up_proj.weight": (INNER, HIDDEN),
    f"{LAYER}mlp.down_proj.weight": (HIDDEN, INNER),
}


@cache
def light_model() -> str:
    """Return the model's folder, which exists until this process ends."""
    kept = tempfile.TemporaryDirectory(prefix="pm-light-")
    _kept.append(kept)
    folder = Path(kept.name, NAME)
    folder.mkdir()
    write_light_model(folder)
    return str(folder)


_kept: list[tempfile.TemporaryDirectory[str]] = []


def write_light_model(folder: Path) -> None:
    tokenizer = byte_tokenizer(PAIRS)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(_zeros())


def _zeros() -> bytes:
    header, end = {}, 0
    for name, shape in SHAPES.items():
        start, end = end, end + 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(end)
