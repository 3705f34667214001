"""Fills a model from named tensors: every tensor has one place, every place gets its tensor."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pagemill_engine.models.blocks import CausalLM, Embedding, Linear, RMSNorm
from pagemill_engine.models.errors import WeightsError
from pagemill_engine.models.tensors import Shapes, TensorSource

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
"""Paths of the two layers that tied models share."""

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Derived values that old checkpoints store."""


Layer = Linear | RMSNorm | Embedding


def check_depth(num_layers: int, shapes: Shapes) -> None:
    """Raises `WeightsError` where the files hold nothing of a layer: a model of thousands takes seconds to build."""
    stored = {name.split(".", 3)[2] for name in shapes if name.startswith("model.layers.")}
    absent = [f"model.layers.{layer}" for layer in range(num_layers) if str(layer) not in stored]
    if absent:
        raise WeightsError(f"The configuration asks for {num_layers} layers (missing: {_listing(absent)}).")


def load_weights(model: CausalLM, source: TensorSource, ignore: frozenset[str] = frozenset()) -> None:
    """Fill the model, layer by layer. Raises `WeightsError` that names missing, unexpected and misshapen tensors.

    In a tied model head and embedding share the embedding's matrix, whatever the file repeats under the head's name.
    """
    layers = dict(_layers(model))
    tied = model.spec.tie_word_embeddings
    if tied:
        layers.pop(HEAD)
        ignore |= {f"{HEAD}.weight"}
    wanted = {name: shape for path, layer in layers.items() for name, shape in layer.shapes(path).items()}
    _check(wanted, {name: shape for name, shape in source.shapes.items() if name not in ignore and not _ignored(name)})
    if tied:
        model.lm_head.load(EMBEDDING, source)
        if model.embedding.tie(model.lm_head):
            layers.pop(EMBEDDING)
    for path, layer in layers.items():
        layer.load(path, source)


def weight_bytes(model: CausalLM) -> int:
    """Memory of all weights as they lie on the device; what layers share counts once."""
    packed: dict[int, int] = {}
    for _, layer in _layers(model):
        if isinstance(layer, RMSNorm):
            packed[id(layer)] = layer.weight.nbytes
            continue
        held = layer.packed if isinstance(layer, Linear) else layer.rows
        packed[id(held)] = held.num_bytes
    return sum(packed.values())


def weight_tensors(model: CausalLM) -> Iterator[Tensor]:
    """All tensors that its layers hold; those that layers share come more than once."""
    for _, layer in _layers(model):
        if isinstance(layer, RMSNorm):
            yield layer.weight
            continue
        held = layer.packed if isinstance(layer, Linear) else layer.rows
        yield from (value for value in vars(held).values() if isinstance(value, Tensor))


def _layers(model: CausalLM) -> Iterator[tuple[str, Layer]]:
    for path, module in model.named_modules():
        if isinstance(module, Layer):
            yield path, module


def _ignored(name: str) -> bool:
    return name.endswith(_IGNORED_SUFFIXES)


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
