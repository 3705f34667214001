"""Fills a model from named tensors, each of which is used exactly once."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pagemill_execution.decoders.fitting import check_tensors
from pagemill_execution.decoders.on_torch.decoder import Decoder, Model
from pagemill_execution.decoders.on_torch.layers import layer_tensors, layer_weight_bytes
from pagemill_execution.decoders.tensors import TensorSource


def load_weights(model: Decoder, source: TensorSource) -> None:
    """Fill the model, layer by layer. Raises `WeightsError` that names missing, unexpected and misshapen tensors.

    In a tied model head and embedding share the embedding's matrix.
    """
    declared = model.spec.decoder
    check_tensors(declared.shapes(), source.shapes)
    layers = list(model.weight_layers())
    if model.lm_head is not None and declared.head is not None and declared.head.tied:
        model.lm_head.load(source)
        layers.remove(model.lm_head)
        if model.embedding is not None and model.embedding.tie(model.lm_head):
            layers.remove(model.embedding)
    for layer in layers:
        layer.load(source)


def weight_bytes(model: Model) -> int:
    """Return the bytes of all weights on the device. Shared weights count once."""
    return sum({id(layer.held()): layer_weight_bytes(layer) for layer in model.weight_layers()}.values())


def weight_tensors(model: Model) -> Iterator[Tensor]:
    """Yield all tensors of the layers. Shared tensors are yielded more than once."""
    for layer in model.weight_layers():
        yield from layer_tensors(layer)
