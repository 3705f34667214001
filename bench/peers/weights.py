"""The same weights in every format: the embedded model's Q4_1 file, and its values in the formats of other engines.

The folder and the larger GGUF files have the dequantized values, rounded to bfloat16 once, so that no engine has better
weights than another. They are written below `.pagemill/peers/weights` on first use.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from checkpoint import llama_config
from workload import MODEL

from pagemill_models.sources import resolve_source
from peers.install import FOLDER

NAME = "SmolLM2-135M-Instruct"


def path_of(kind: str) -> Path:
    """Return the path of `folder`, `q4_1`, `q8_0`, `bf16` or `f16`; write it if it does not exist."""
    if kind == "q4_1":
        return resolve_source(MODEL)
    target = FOLDER / "weights" / (NAME if kind == "folder" else f"{NAME}.{kind.upper()}.gguf")
    if target.exists():
        return target
    draft = target.with_name(f"draft-{target.name}")
    draft.parent.mkdir(parents=True, exist_ok=True)
    if draft.is_dir():
        shutil.rmtree(draft)
    if kind == "folder":
        write_folder(resolve_source(MODEL), draft)
    else:
        write_gguf(resolve_source(MODEL), draft, kind)
    draft.rename(target)
    return target


def write_folder(source: Path, folder: Path) -> None:
    """Write a Hugging Face folder in bfloat16, read by Pagemill's own readers."""
    import torch
    from safetensors.torch import save_file

    from pagemill_execution.weights.opening import open_weights
    from pagemill_kernels.torch_arrays import from_torch
    from pagemill_models.spec.model_files import load_model_spec

    folder.mkdir(parents=True)
    weights = open_weights(source)
    tensors = {}
    for name, shape in weights.shapes.items():
        tensors[name] = torch.empty(shape, dtype=torch.bfloat16)
        weights.read_into(name, from_torch(tensors[name]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    spec = load_model_spec(source)
    config = llama_config(spec) | {"torch_dtype": "bfloat16"}
    write_tokenizer(source, folder, config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_tokenizer(source: Path, folder: Path, config: dict[str, Any]) -> None:
    from pagemill_models.tokenizer_files.load_bundle import load_bundle

    bundle = load_bundle(source)
    config |= {"bos_token_id": bundle.bos_token_id, "eos_token_id": bundle.eos_token_ids[0]}
    (folder / "tokenizer.json").write_text(bundle.tokenizer_json)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bundle.bos_token,
        "eos_token": bundle.eos_token,
        "pad_token": bundle.eos_token,
        "chat_template": bundle.chat_template,
        "model_max_length": config["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_gguf(source: Path, target: Path, kind: str) -> None:
    """Write the same file with its matrices in another storage type; norms stay float32."""
    import gguf
    from gguf.quants import dequantize, quantize

    wanted = gguf.GGMLQuantizationType[kind.upper()]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{wanted.name}"])
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        values = dequantize(tensor.data, tensor.tensor_type)
        rounded = dequantize(quantize(values, gguf.GGMLQuantizationType.BF16), gguf.GGMLQuantizationType.BF16)
        writer.add_tensor(tensor.name, quantize(rounded, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
