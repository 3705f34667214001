"""Fills a model from named tensors: every tensor has one place, every place gets its tensor."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pagemill_engine.models.decoder import Decoder, Model
from pagemill_engine.models.errors import WeightsError
from pagemill_engine.models.layers import held_bytes, held_tensors
from pagemill_engine.models.tensors import Shapes, TensorSource
from pagemill_protocol.models.declaration import DecoderSpec


def check_depth(decoder: DecoderSpec, shapes: Shapes) -> None:
    """Raises `WeightsError` where the files hold nothing of a layer: a model of thousands takes seconds to build."""
    names = [layer.name for layer in decoder.layers]
    depth = names[0].count(".") + 1
    stored = {".".join(name.split(".", depth)[:depth]) for name in shapes}
    absent = [name for name in names if name not in stored]
    if absent:
        raise WeightsError(f"The configuration asks for {len(names)} layers (missing: {_listing(absent)}).")


def load_weights(model: Decoder, source: TensorSource) -> None:
    """Fill the model, layer by layer. Raises `WeightsError` that names missing, unexpected and misshapen tensors.

    In a tied model head and embedding share the embedding's matrix.
    """
    declared = model.spec.decoder
    _check(declared.shapes(), source.shapes)
    layers = list(model.weight_layers())
    if model.lm_head is not None and declared.head is not None and declared.head.tied:
        model.lm_head.load(source)
        layers.remove(model.lm_head)
        if model.embedding.tie(model.lm_head):
            layers.remove(model.embedding)
    for layer in layers:
        layer.load(source)


def weight_bytes(model: Model) -> int:
    """Memory of all weights as they lie on the device; what layers share counts once."""
    return sum({id(layer.held()): held_bytes(layer) for layer in model.weight_layers()}.values())


def weight_tensors(model: Model) -> Iterator[Tensor]:
    """All tensors that its layers hold; those that layers share come more than once."""
    for layer in model.weight_layers():
        yield from held_tensors(layer)


def _check(wanted: Shapes, stored: Shapes) -> None:
    missing, unexpected = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or unexpected:
        problems = [
            f"{what}: {_listing(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        raise WeightsError(f"The weights do not fit the model's configuration ({'; '.join(problems)}).")
    for name, shape in wanted.items():
        if shape != stored[name]:
            raise WeightsError(
                f"The tensor `{name}` has the shape {list(stored[name])} "
                f"where the configuration asks for {list(shape)}."
            )


def _listing(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"`{name}`" for name in names[:limit]) + more
