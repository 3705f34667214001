"""Files of a model that loaders accept: a real configuration, and safetensors of any size with random bytes."""

from __future__ import annotations

import json
import random
import struct

CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def safetensors(num_bytes: int, seed: int = 0) -> bytes:
    header = json.dumps({f"w{seed}": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + random.Random(seed).randbytes(num_bytes)


def gguf_file(num_bytes: int, seed: int = 0) -> bytes:
    """Return a file with one tensor of bytes (type 24, I8) and no metadata."""
    name = b"token_embd.weight"
    head = b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, len(name)) + name + struct.pack("<IQIQ", 1, num_bytes, 24, 0)
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + random.Random(seed).randbytes(num_bytes)


def model_files(num_shards: int = 2, shard_bytes: int = 300_000) -> dict[str, bytes]:
    names = [f"model-{number}.safetensors" for number in range(num_shards)]
    shards = {name: safetensors(shard_bytes, seed) for seed, name in enumerate(names)}
    index = {"weight_map": {f"w{seed}": name for seed, name in enumerate(names)}}
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "tokenizer.json": b"{}",
        **shards,
    }
