"""Make the ModelSpec of a GGUF file from its metadata and tensor table. The model's family interprets the keys."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pagemill_models.declaration.errors import contradictions
from pagemill_models.declaration.gguf_values import EMBEDDING, ROPE_FACTORS, GGUFValues
from pagemill_models.declaration.known import unsupported
from pagemill_models.declaration.registry import FoundFamily, find_gguf_family
from pagemill_models.files.gguf_file import GGMLType, GGUFError, GGUFFile, GGUFTensor
from pagemill_models.spec.contexts import with_scaled_context
from pagemill_models.spec.model_spec import ModelSpec

_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.F64)


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """Return the file's spec, whose numbers are not yet checked against each other. Raises `SourceError`."""
    name, found = family_of(file)
    if file.metadata.get("general.type") == "adapter":
        raise GGUFError(f"`{file.path}` is an adapter. Serve its model with --lora-modules NAME={file.path.name}.")
    if found.family.read_gguf is None:
        raise unsupported(name, file.path, " in a GGUF file")
    tensors, values = file.tensors, GGUFValues(file, name, found.architecture)
    with contradictions(file.path):
        decoder = with_scaled_context(found.family.read_gguf(values), file.path)
    if values.number("expert_count", default=0) and not any(decoder.mixtures()):
        raise values.unsupported("experts")
    return ModelSpec(
        decoder=decoder,
        quantization=_main_type(file),
        weights_format="gguf",
        weight_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        num_parameters=sum(tensor.num_elements for name, tensor in tensors.items() if name != ROPE_FACTORS),
    )


def stored_gguf(path: Path) -> dict[str, GGUFTensor]:
    """Return a file's tensors by their Hugging Face names, where `*` stands for all experts. Raises `SourceError`."""
    file = GGUFFile(path)
    names = family_of(file)[1].family.gguf_names
    return {name if names is None else names.hugging_face_name(name): each for name, each in file.tensors.items()}


def family_of(file: GGUFFile) -> tuple[str, FoundFamily]:
    """Return `general.architecture` and the family of that name. Raises `SourceError`."""
    name = file.get("general.architecture", str)
    if name is None:
        raise GGUFError(f"`{file.path}` has no `general.architecture`. Convert the model again.")
    return name, find_gguf_family(name, file.path)


def _main_type(file: GGUFFile) -> str | None:
    """Return the name of the storage type of most weights, or None for floats."""
    sizes: Counter[GGMLType] = Counter()
    for name, tensor in file.tensors.items():
        if name != EMBEDDING:
            sizes[tensor.ggml_type] += tensor.num_elements
    main = sizes.most_common(1)[0][0] if sizes else None
    return None if main is None or main in _FLOATS else main.name
