"""Heads that draft tokens from the hidden states of another model, as specs of their own: EAGLE-3 checkpoints, and the
layers for multi-token prediction behind a model's last one.

A head is declared as a decoder of one layer with `reads`. Whether it fits a model is decided by `sizing.draft`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import CONFIG_FILE, ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    LinearSpec,
    NormSpec,
    ReadsSpec,
)
from pagemill_models.declaration.errors import contradictions
from pagemill_models.declaration.limits import held_by
from pagemill_models.declaration.parts import linear
from pagemill_models.declaration.quantization_settings import quantization_bits, quantization_of
from pagemill_models.families.llama_like import decoder, named_layer, numbers_from_config
from pagemill_models.files.gguf_file import GGUFTensor
from pagemill_models.files.safetensors_header import TensorHeader, lacks_weights, read_folder_headers
from pagemill_models.spec.model_spec import ModelSpec, checked
from pagemill_models.spec.spec_from_config import check_config, read_config
from pagemill_models.spec.spec_from_gguf import stored_gguf
from pagemill_protocol.source_errors import UnreadableModelError

EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaEagle3ForCausalLM")
"""Architectures of published heads: a layer like Llama's."""
D2T, T2D = "d2t", "t2d"
"""Of each token of the head's own vocabulary, how much larger its id is in the target's; whether a token has one."""


_OF_EXPERT = re.compile(r"\.experts\.\d+\.")


def mtp_heads(spec: ModelSpec) -> list[ModelSpec]:
    """Return the heads of a model's own layers for multi-token prediction."""
    found = []
    for mtp in spec.decoder.mtp:
        own = replace(
            spec.decoder,
            layers=(mtp.layer,),
            norm=mtp.norm,
            head=None,
            embeds=False,
            reads=mtp.reads,
            mtp=(),
            ignored=(*spec.decoder.ignored, ".embed_tokens.weight", ".shared_head.head.weight"),
            ignored_layers=(),
        )
        found.append(replace(spec, decoder=own))
    return found


def stored_of(heads: list[ModelSpec], path: Path) -> list[ModelSpec]:
    """Return the first of these heads, and those behind it whose tensors are in the files of `path`; all of them if
    these have not been fetched."""
    if len(heads) < 2 or (path.is_dir() and lacks_weights(path)):
        return heads
    stored = _headers(path)
    absent = (number for number, head in enumerate(heads[1:], start=1) if not _has(stored, head, path))
    return heads[: next(absent, len(heads))]


def stored_mtp_heads(spec: ModelSpec, path: Path, *, whole: bool) -> list[ModelSpec]:
    """Return a model's own heads with the sizes of their tensors in the files of `path`, whose headers alone are read.
    `whole`: none unless all tensors of the first are there, under their plain names."""
    heads = mtp_heads(spec)
    stored = _headers(path) if heads else {}
    if not heads or (whole and not _has(stored, heads[0], path)):
        return []
    found = []
    for head in stored_of(heads, path):
        assert head.decoder.reads is not None
        prefix = head.decoder.reads.prefix
        own = [each for name, each in stored.items() if name.startswith(prefix) and not head.decoder.is_ignored(name)]
        sizes = {"weight_bytes": sum(each.num_bytes for each in own)}
        found.append(replace(head, **sizes, num_parameters=sum(each.num_elements for each in own)))
    return found


def _headers(path: Path) -> Mapping[str, TensorHeader | GGUFTensor]:
    return read_folder_headers(path) if path.is_dir() else stored_gguf(path)


def _has(stored: Mapping[str, TensorHeader | GGUFTensor], head: ModelSpec, path: Path) -> bool:
    """Whether all tensors of a head are stored. A GGUF file has the matrices of all experts in one tensor."""
    names = head.decoder.shapes()
    return {name if path.is_dir() else _OF_EXPERT.sub(".experts.*.", name) for name in names} <= stored.keys()


def check_stored_config(folder: Path) -> None:
    """Check `config.json`, of a model or of a head, before the weights have arrived. Raises `SourceError`."""
    where, values = folder / CONFIG_FILE, read_config(folder)
    if not _names_eagle3(values):
        check_config(folder)
        return
    with contradictions(where):
        _eagle3(ConfigValues(where, values, EAGLE3[0]), embeds=False)


def _names_eagle3(values: dict[str, Any]) -> bool:
    names = values.get("architectures") or ()
    return isinstance(names, list) and any(name in EAGLE3 for name in names)


def eagle3_head(path: Path) -> ModelSpec:
    """Return the spec of a folder with an EAGLE-3 head. Raises `SourceError`."""
    if not path.is_dir():
        raise UnreadableModelError(
            f"`{path}` is no folder; EAGLE-3 heads are folders with config.json and safetensors."
        )
    where, values = path / CONFIG_FILE, read_config(path)
    if not _names_eagle3(values):
        raise UnreadableModelError(f"`{where}` names no EAGLE-3 head (architectures: {', '.join(EAGLE3[:1])}).")
    tensors = read_folder_headers(path)
    config = ConfigValues(where, values, EAGLE3[0], held_by(tensor.shape for tensor in tensors.values()))
    with contradictions(where):
        own = _eagle3(config, embeds="embed_tokens.weight" in tensors)
    if own.vocab_size != own.embedding.num_rows and D2T not in tensors:
        raise UnreadableModelError(
            f"`{path}` has a vocabulary of {own.vocab_size} tokens of the model's {own.embedding.num_rows}, but no "
            f"tensor `{D2T}` that says which."
        )
    counted = [tensor for name, tensor in tensors.items() if not own.is_ignored(name)]
    return checked(
        ModelSpec(
            decoder=own,
            quantization=quantization_of(values),
            quantization_bits=quantization_bits(values),
            weight_bytes=sum(tensor.num_bytes for tensor in counted),
            num_parameters=sum(tensor.num_elements for tensor in counted),
        ),
        path,
    )


def _eagle3(config: ConfigValues, *, embeds: bool) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=2048)
    if numbers.num_layers != 1:
        raise config.unsupported(f"EAGLE-3 heads of {numbers.num_layers} layers")
    biased = config.flag("attention_bias", False)
    numbers = replace(numbers, attention_bias=biased, mlp_bias=config.flag("mlp_bias", False))
    plain = decoder(numbers)
    size, eps = numbers.hidden_size, numbers.rms_norm_eps
    target_size = config.size("hidden_size", "target_hidden_size", "hidden_size")
    layer = named_layer(numbers, 0, "midlayer")
    attention = layer.residuals[0].branches[0]
    assert isinstance(attention.block, AttentionSpec)
    wide = replace(attention.block, qkv=LinearSpec(2 * size, attention.block.qkv.parts))
    first = replace(layer.residuals[0], branches=(replace(attention, block=wide, norm=None),))
    return replace(
        plain,
        vocab_size=config.size("vocab_size", "draft_vocab_size", "vocab_size"),
        embedding=EmbeddingSpec(name="embed_tokens", num_rows=numbers.vocab_size, size=size),
        layers=(replace(layer, residuals=(first, *layer.residuals[1:])),),
        norm=NormSpec(name="norm", size=size, eps=eps),
        head=HeadSpec(name="lm_head", tied=False),
        embeds=embeds,
        ignored=(*plain.ignored, D2T, T2D),
        reads=ReadsSpec(
            embedding_norm=NormSpec(name="midlayer.input_layernorm", size=size, eps=eps),
            hidden_norm=NormSpec(name="midlayer.hidden_norm", size=size, eps=eps),
            states=linear(3 * target_size, ("fc", size)),
            layers=_layers(config),
            normed_residual=config.flag("norm_before_residual", False),
        ),
    )


def _layers(config: ConfigValues) -> tuple[int, ...] | None:
    """Return the layers before which hidden states are read: `eagle_config` numbers those behind which they are."""
    key = "eagle_aux_hidden_state_layer_ids"
    nested = config.object("eagle_config").get(key)
    found = config.integers(key) if nested is None else [each + 1 for each in nested if type(each) is int]
    if not found and nested is None:
        return None
    if len(found) != 3 or sorted(set(found)) != found:
        raise config.wrong(key, found if nested is None else nested, "three growing layer numbers")
    return tuple(found)
