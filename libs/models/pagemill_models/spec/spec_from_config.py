"""Make the ModelSpec of a Hugging Face folder: config.json for the decoder, safetensors headers for the sizes.

The model's family interprets the keys of config.json; type and quantization of the weights are read here.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import msgspec

from pagemill_models.declaration.config_values import AUTO_GPTQ_FILE, CONFIG_FILE
from pagemill_models.declaration.limits import MAX_PARTS, Held, held_by
from pagemill_models.declaration.quantization_settings import (
    check_quantization,
    check_settings,
    quantization_bits,
    quantization_of,
)
from pagemill_models.files.json_file import read_object, read_optional
from pagemill_models.files.safetensors_header import TensorHeader, read_folder_headers, read_index
from pagemill_models.spec.decoders import decoder_from_config
from pagemill_models.spec.model_spec import ModelSpec, checked
from pagemill_models.spec.pooling_files import most_tokens, read_pooling
from pagemill_models.spec.sentence_modules import behind_pooling, read_modules
from pagemill_models.spec.stored_names import declared_names, with_stored_head
from pagemill_protocol.source_errors import UnreadableModelError


def read_config(folder: Path) -> dict[str, Any]:
    """Return the values of a folder's `config.json`, with those of `AUTO_GPTQ_FILE` as `quantization_config` if it has
    none. Raises `UnreadableModelError`."""
    values = read_object(folder / CONFIG_FILE)
    check_settings(values, folder / CONFIG_FILE)
    if values.get("quantization_config") is None and (settings := read_optional(folder / AUTO_GPTQ_FILE)):
        return {**values, "quantization_config": {"quant_method": "gptq", **settings}}
    return values


def spec_from_folder(folder: Path, *, by_index: bool = False) -> ModelSpec:
    """Return the folder's spec, whose numbers are not yet checked against each other. Raises `SourceError`.

    `by_index`: the weights are absent, and their index is read instead.
    """
    path, values = folder / CONFIG_FILE, read_config(folder)
    index = read_index(folder) if by_index else None
    tensors = {} if by_index else _headers_of(folder, values)
    if index is not None:
        held = Held(len(index.names), index.num_bytes or sys.maxsize, MAX_PARTS)
    else:
        held = held_by(tensor.shape for tensor in tensors.values())
    decoder = decoder_from_config(values, path, held)
    names = declared_names(tensors if index is None else index.names, decoder)
    decoder = with_stored_head(decoder, folder, names, by_index=by_index)
    pooling = None
    if decoder.head is None:
        modules = None if decoder.classifier is not None else read_modules(folder, decoder.hidden_size)
        after = decoder.classifier if modules is None else behind_pooling(modules)
        most = most_tokens(folder, decoder)
        decoder = msgspec.structs.replace(decoder, max_position_embeddings=most, classifier=after)
        pooling = read_pooling(folder, values, decoder, modules)
    quantization = quantization_of(values)
    if index is not None:
        counted, weight_bytes = None, index.num_bytes
    else:
        counted = [tensors[at] for name, at in names.items() if not decoder.is_ignored(name)]
        weight_bytes = sum(tensor.num_bytes for tensor in counted)
    if counted is None or quantization is not None:
        # An index has no shapes, and one stored element may hold several quantized weights.
        num_parameters = sum(math.prod(shape) for shape in decoder.shapes().values())
    else:
        num_parameters = sum(tensor.num_elements for tensor in counted)
    return ModelSpec(
        decoder=decoder,
        dtype=_dtype(values),
        quantization=quantization,
        quantization_bits=quantization_bits(values),
        weights_format="safetensors",
        weight_bytes=weight_bytes,
        num_parameters=num_parameters,
        pooling=pooling,
    )


def _headers_of(folder: Path, values: dict[str, Any]) -> dict[str, TensorHeader]:
    """Return the headers of all weights. Raises `SourceError`, first about a model that is not supported."""
    try:
        return read_folder_headers(folder)
    except UnreadableModelError:
        decoder_from_config(values, folder / CONFIG_FILE)
        raise


def check_config(folder: Path) -> None:
    """Check `config.json` before the weights have arrived. Raises `SourceError`."""
    path, values = folder / CONFIG_FILE, read_config(folder)
    checked(ModelSpec(decoder=decoder_from_config(values, path)), folder)
    check_quantization(quantization_of(values), f"`{folder}`")


def _dtype(values: dict[str, Any]) -> str | None:
    text = values.get("text_config")
    found = [each.get(key) for each in (values, text) if isinstance(each, dict) for key in ("dtype", "torch_dtype")]
    value = next(filter(None, found), None)
    return value.removeprefix("torch.") if isinstance(value, str) else None
