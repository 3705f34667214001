"""A model's folder without its weights: `config.json` and the index of the files that are gone."""

from __future__ import annotations

import json
from pathlib import Path

from pagemill_protocol.safetensors_header import INDEX_FILE, read_header


def outline(folder: Path, *, num_shards: int = 2) -> None:
    """Remove the weights of `folder` and leave an index of so many shards that would have held them."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = [tensor for file in files for tensor in read_header(file)]
    shards = [f"model-{number + 1:05}-of-{num_shards:05}.safetensors" for number in range(num_shards)]
    weight_map = {tensor.name: shards[at % num_shards] for at, tensor in enumerate(tensors)}
    metadata = {"total_size": sum(tensor.num_bytes for tensor in tensors)}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    for file in files:
        file.unlink()
