"""Checks that a checkpoint's tensors are those of a model's declaration."""

from __future__ import annotations

from pagemill_execution.decoders.errors import WeightsError
from pagemill_models.declaration.declaration import DecoderSpec, Shapes

_PACKED = (
    " They are packed, and config.json has no `quantization_config` that says how: add it, or AutoGPTQ's "
    "quantize_config.json to the folder."
)


def check_depth(decoder: DecoderSpec, shapes: Shapes) -> None:
    """Raise `WeightsError` if the files have no tensor of some layer.

    This is checked before building, because building a model of thousands of layers takes seconds.
    """
    names = [layer.name for layer in decoder.layers]
    depth = names[0].count(".") + 1
    stored = {".".join(name.split(".", depth)[:depth]) for name in shapes}
    absent = [name for name in names if name not in stored]
    if absent:
        raise WeightsError(f"The configuration asks for {len(names)} layers (missing: {_listing(absent)}).")


def check_tensors(wanted: Shapes, stored: Shapes) -> None:
    """Raise `WeightsError` that names missing, unexpected and misshapen tensors."""
    missing, unexpected = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or unexpected:
        problems = [
            f"{what}: {_listing(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        remedy = _PACKED if any(name.endswith(".qweight") for name in unexpected) else ""
        raise WeightsError(f"The weights do not fit the model's configuration ({'; '.join(problems)}).{remedy}")
    for name, shape in wanted.items():
        if shape != stored[name]:
            raise WeightsError(
                f"The tensor `{name}` has the shape {list(stored[name])} "
                f"where the configuration asks for {list(shape)}."
            )


def _listing(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"`{name}`" for name in names[:limit]) + more
