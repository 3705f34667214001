"""Fills a model from named tensors: every tensor has one place, every place gets its tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from pagemill_engine.models.blocks import CausalLM, Linear
from pagemill_engine.models.errors import WeightsError

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Derived values that old checkpoints store."""


def load_weights(model: CausalLM, shapes: dict[str, tuple[int, ...]], read_into: Callable[[str, Tensor], None]) -> None:
    """Read all tensors into the model and pack it.

    `shapes`: what the checkpoint holds, by Hugging Face name; `read_into(name, out)` fills a tensor from it.
    Raises `WeightsError` that names missing, unexpected and misshapen tensors.
    """
    views = dict(_weight_views(model))
    tied = model.spec.tie_word_embeddings
    if tied:
        # The file may repeat the shared matrix under the head's name: the embedding's is the one that counts.
        views.pop("lm_head.weight")
    unread = {"lm_head.weight"} if tied else set()
    _check(views, {name: shape for name, shape in shapes.items() if name not in unread and not _ignored(name)})
    for name, view in views.items():
        read_into(name, view)
    if tied:
        model.lm_head.weight = model.get_submodule("model.embed_tokens").weight  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()


def _weight_views(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        if hasattr(module, "weight_views"):
            yield from module.weight_views(name)


def _ignored(name: str) -> bool:
    return name.endswith(_IGNORED_SUFFIXES)


def _check(views: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    missing, unexpected = sorted(views.keys() - shapes.keys()), sorted(shapes.keys() - views.keys())
    if missing or unexpected:
        problems = [
            f"{what}: {_listing(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        raise WeightsError(f"The weights do not fit the model's configuration ({'; '.join(problems)}).")
    for name, view in views.items():
        if tuple(view.shape) != shapes[name]:
            raise WeightsError(
                f"The tensor `{name}` has the shape {list(shapes[name])} "
                f"where the configuration asks for {list(view.shape)}."
            )


def _listing(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"`{name}`" for name in names[:limit]) + more
