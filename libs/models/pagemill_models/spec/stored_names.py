"""Which stored tensor each declared tensor is: prefixes that files add or leave out, tensors of encoders, and heads.

A stored head is used as in transformers 5: also beside a configuration that shares the embedding with it, unless it is
a copy. A copy is not kept in memory twice; its bytes are compared once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from pagemill_models.declaration.changes import changed_head, replace
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.files.encoder_files import is_of_encoder
from pagemill_models.files.partial_download import awaited_bytes
from pagemill_models.files.regular_file import open_regular
from pagemill_models.files.safetensors_header import TensorHeader, read_shard, shard_paths

CHUNK_BYTES = 1024**2
_DECLARED = "model."
_PREFIXES = ("model.language_model.", "language_model.model.", _DECLARED)
"""Prefixes of a text part's tensors, of which a file has one."""
_OLD = {"gamma": "weight", "beta": "bias"}
_MIXTRAL = ".block_sparse_moe."
_OF_EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def declared_names(stored: Iterable[str], decoder: DecoderSpec) -> dict[str, str]:
    """Return the stored name of each declared name; a name that is not declared is returned for itself."""
    of_mixtral = any(_MIXTRAL in name for mixture in decoder.mixtures() for name in mixture.gate_names())
    current = {_of_mixtral(_current(name)) if of_mixtral else _current(name): name for name in stored}
    for other, declared in decoder.renamed.items():
        current = {name.replace(other, declared): stored_name for name, stored_name in current.items()}
    return {declared: current[name] for declared, name in _prefixed(list(current), decoder).items()}


def _current(name: str) -> str:
    """Return the name of a norm's tensor for that of files before 2019, which transformers renames, too."""
    owner, _, part = name.rpartition(".")
    return f"{owner}.{_OLD[part]}" if part in _OLD and owner.endswith("LayerNorm") else name


def _of_mixtral(name: str) -> str:
    """Return Mixtral's name for that of a file whose experts have the names of transformers 5's modules."""
    if ".mlp.gate." not in name and ".mlp.experts." not in name:
        return name
    owner, _, part = name.replace(".mlp.", _MIXTRAL).rpartition(".")
    base, _, matrix = owner.rpartition(".")
    return f"{base}.{_OF_EXPERT.get(matrix, matrix)}.{part}"


def _prefixed(stored: list[str], decoder: DecoderSpec) -> dict[str, str]:
    if decoder.text_only:
        prefix = _prefix(stored, decoder)
        return {_text_name(name, prefix): name for name in stored if not is_of_encoder(name)}
    prefix = decoder.optional_prefix
    if not prefix or any(name.startswith(prefix) for name in stored):
        return {name: name for name in stored}
    declared = decoder.shapes()
    return {name if name in declared or decoder.is_ignored(name) else prefix + name: name for name in stored}


def _prefix(stored: list[str], decoder: DecoderSpec) -> str:
    """Return the prefix before the embedding; a file without one of them lacks declared tensors."""
    embedding = decoder.embedding.name.removeprefix(_DECLARED) + "."
    return next((each for each in _PREFIXES if any(name.startswith(each + embedding) for name in stored)), _DECLARED)


def _text_name(name: str, prefix: str) -> str:
    if name.startswith(prefix):
        return _DECLARED + name.removeprefix(prefix)
    of_head = name.removeprefix("model.").removeprefix("language_model.")
    return of_head if of_head.startswith("lm_head.") else name


def with_stored_head(
    decoder: DecoderSpec, folder: Path, stored: Mapping[str, str], *, by_index: bool = False
) -> DecoderSpec:
    """Return the decoder with the head that the files hold, whatever their configuration says about the embedding.

    `stored`: the stored name of each declared one. `by_index`: the weights are absent, so that nothing is compared.
    """
    if decoder.head is None or not decoder.head.tied:
        return decoder
    head, embedding = stored.get(f"{decoder.head.name}.weight"), stored.get(f"{decoder.embedding.name}.weight")
    if head is None or embedding is None or (not by_index and _are_equal(folder, head, embedding)):
        return decoder
    return replace(decoder, head=changed_head(decoder, tied=False))


def _are_equal(folder: Path, *names: str) -> bool:
    """Whether two stored tensors have the same type, shape and bytes. Files that arrive are not waited for: false."""
    found = [(shard, each) for shard in shard_paths(folder) for each in read_shard(folder, shard) if each.name in names]
    (path, one), (other_path, other) = found
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if any(awaited_bytes(each) is not None for each in (path, other_path)):
        return False
    with open(open_regular(path, folder), "rb") as file, open(open_regular(other_path, folder), "rb") as other_file:
        starts = range(0, one.num_bytes, CHUNK_BYTES)
        return all(_chunk(file, one, start) == _chunk(other_file, other, start) for start in starts)


def _chunk(file: BinaryIO, tensor: TensorHeader, start: int) -> bytes:
    file.seek(tensor.offset + start)
    return file.read(min(CHUNK_BYTES, tensor.num_bytes - start))
