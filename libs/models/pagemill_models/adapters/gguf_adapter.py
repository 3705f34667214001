"""Reads an adapter in a GGUF file, as llama.cpp's converter writes it: `blk.0.attn_q.weight.lora_a` and `.lora_b`.

Names and orders of rows are those of the architecture's model files, so that its family translates them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pagemill_models.adapters.errors import unreadable, unsupported
from pagemill_models.adapters.names import MatrixPlace, Modules
from pagemill_models.adapters.parts import AdapterFiles, LowRank, check_once, check_rank, other_shape, refused_tensor
from pagemill_models.declaration.caches import DeltaRuleSpec, RecurrentSpec
from pagemill_models.declaration.declaration import AttentionSpec, DecoderSpec
from pagemill_models.declaration.family import GGUFNames
from pagemill_models.files.gguf_file import GGUFFile, GGUFTensor
from pagemill_models.files.safetensors_header import TensorHeader
from pagemill_models.spec.spec_from_gguf import family_of
from pagemill_protocol.source_errors import SourceError, UnreadableModelError

_ALPHA = "adapter.lora.alpha"
_KNOWN = ("adapter.type", _ALPHA, "adapter.lora.task_name", "adapter.lora.prompt_prefix")
"""Keys below `adapter.` that are read, or describe the file."""
_BASE = "general.base_model.0.repo_url"
_SIDES = (".lora_a", ".lora_b")
SAME_FILES = "Serve PEFT's folder with the model's folder, or a GGUF file with a GGUF file."


def read_gguf_adapter(path: Path, decoder: DecoderSpec, max_rank: int) -> AdapterFiles:
    """Read metadata and names. Raises `AdapterError`."""
    try:
        file = GGUFFile(path)
        kind = file.get("general.type", str), file.get("adapter.type", str)
        alpha, base = file.get(_ALPHA, (int, float), 0), file.get(_BASE, str)
    except UnreadableModelError as error:
        raise unreadable(error.message) from None
    if kind != ("adapter", "lora"):
        raise unsupported(
            f"`{path}` has general.type `{kind[0]}` and adapter.type `{kind[1]}`; a LoRA adapter has `adapter` and "
            "`lora`. Name the file that llama.cpp's convert_lora_to_gguf.py wrote."
        )
    for key in file.metadata:
        if key.startswith("adapter.") and key not in _KNOWN:
            raise unsupported(f"`{path}` sets `{key}`, which is not served. Train an adapter without it.")
    if len(file.paths) > 1:
        raise unsupported(f"`{path}` is split over {len(file.paths)} files. Convert the adapter into one file.")
    try:
        _, found = family_of(file)
    except SourceError as error:
        raise unsupported(error.message) from None
    names = found.family.gguf_names
    if names is None:
        raise unsupported(f"`{path}`: GGUF files of `{found.architecture}` are not read. Serve PEFT's folder.")
    if names.folded != decoder.folded:
        raise unsupported(f"`{path}` has factors of the model in its matrices, and the base has not. {SAME_FILES}")
    modules = Modules(decoder)
    parts = [
        part
        for name, sides in _pairs(file.tensors).items()
        for part in _parts(name, sides, names, modules, decoder, float(alpha), max_rank)
    ]
    check_once(parts)
    return AdapterFiles(path, base, parts, [], [_header(tensor) for tensor in file.tensors.values()])


def _pairs(tensors: Mapping[str, GGUFTensor]) -> dict[str, tuple[TensorHeader, TensorHeader]]:
    """Return A and B by the names of the matrices to which they add."""
    for name in tensors:
        matrix, side = name[: -len(_SIDES[0])], name[-len(_SIDES[0]) :]
        if side not in _SIDES:
            raise refused_tensor(
                _header(tensors[name]),
                "is no matrix of LoRA; trained norms and biases are not served. Train the adapter with bias='none' and "
                "without modules_to_save, or merge it into a copy of the model",
            )
        other = matrix + _SIDES[1 - _SIDES.index(side)]
        if other not in tensors:
            raise unreadable(f"The file has `{name}` and no `{other}`. Fetch it again.")
    matrices = [name.removesuffix(_SIDES[0]) for name in tensors if name.endswith(_SIDES[0])]
    if not matrices:
        raise unreadable("The file has no tensor of LoRA, such as `blk.0.attn_q.weight.lora_a`.")
    return {each: (_header(tensors[each + _SIDES[0]]), _header(tensors[each + _SIDES[1]])) for each in matrices}


def _header(tensor: GGUFTensor) -> TensorHeader:
    return TensorHeader(tensor.name, tensor.ggml_type.name, tensor.shape, tensor.offset, tensor.num_bytes)


def _parts(
    name: str,
    sides: tuple[TensorHeader, TensorHeader],
    names: GGUFNames,
    modules: Modules,
    decoder: DecoderSpec,
    alpha: float,
    max_rank: int,
) -> Iterator[LowRank]:
    a, b = sides
    if names.in_a_layer(name) in names.tiled and any(_is_tiled(each) for each in decoder.recurrent()):
        raise refused_tensor(a, "is of a delta rule, whose value heads converters reorder. Serve PEFT's folder")
    module = names.hugging_face_name(name).removesuffix(".weight")
    places = _places(module, a, modules)
    rank = b.shape[-1]
    check_rank(a.name, rank, max_rank)
    for expert, place in enumerate(places):
        ins = place.use.spec.out_features if place.use.is_table else place.use.spec.in_features
        stack = (len(places),) if "*" in module else ()
        for header, wanted in (
            (a, (*stack, ins, rank) if place.use.is_table else (*stack, rank, ins)),
            (b, (*stack, place.rows, rank)),
        ):
            if header.shape != wanted:
                raise other_shape(header, wanted)
        yield LowRank(
            place.use,
            place.first,
            a,
            b,
            rank,
            alpha / rank if alpha else 1.0,
            expert if stack else None,
            len(places),
            is_converted=True,
            heads=_interleaved_heads(name, names, decoder, place),
        )


def _places(module: str, header: TensorHeader, modules: Modules) -> list[MatrixPlace]:
    """Return the place of a matrix, or those of all experts' matrices."""
    numbers = [str(expert) for expert in range(header.shape[0])] if "*" in module else [""]
    places = [place for each in numbers if (place := modules.place(module.replace("*", each))) is not None]
    if len(places) != len(numbers):
        raise refused_tensor(
            header,
            f"adds to `{module}`, which is no matrix of this model's files. Serve PEFT's folder, or the adapter with "
            "a GGUF file of the model",
        )
    return places


def _is_tiled(rule: RecurrentSpec) -> bool:
    return isinstance(rule, DeltaRuleSpec) and rule.num_key_heads != rule.num_value_heads


def _interleaved_heads(name: str, names: GGUFNames, decoder: DecoderSpec, place: MatrixPlace) -> int:
    key = names.heads_key(name)
    if key is None or place.use.layer is None:
        return 0
    blocks = decoder.layers[place.use.layer].blocks()
    attention = next(block for block in blocks if isinstance(block, AttentionSpec))
    return attention.num_kv_heads if key.endswith("_kv") else attention.num_heads
