"""Read sentence-transformers' modules behind the transformer from a folder: pooling, dense layers, normalization.

Every key of `modules.json` and of the modules' own files is honoured or refused by its name. `pooling_files` reads the
settings of the whole model; the weights of dense layers are named by their module's folder (`safetensors_header`).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from pagemill_models.declaration.declaration import Activation, ClassifierSpec, DenseSpec, LinearSpec, MatrixSpec
from pagemill_models.declaration.errors import UnsupportedModelArchitecture
from pagemill_models.files.json_file import read_optional, read_text
from pagemill_models.files.regular_file import MODULES_FILE, exists, path_inside
from pagemill_protocol.request.pooling import PoolingMethod
from pagemill_protocol.source_errors import UnreadableModelError

_METHODS: dict[str, PoolingMethod] = {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
}
"""Values of `pooling_mode`."""
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The flags that older files have in place of `pooling_mode`."""
_ACTIVATIONS: dict[str, Activation | Literal["tanh"] | None] = {
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
_EMBEDDING: dict[str, tuple[Any, ...]] = {
    "module_input_name": ("sentence_embedding",),
    "module_output_name": (None, "sentence_embedding"),
}
"""What modules behind the pooling read and write."""
_SIZES = ("embedding_dimension", "word_embedding_dimension")
_ORDER = ["Transformer", "Pooling", "Dense", "Normalize"]


class PoolingModules(NamedTuple):
    method: PoolingMethod
    dense: tuple[DenseSpec, ...]
    normalized: bool


def read_modules(folder: Path, hidden_size: int) -> PoolingModules:
    """Return what follows the transformer. Raises `SourceError`.

    A folder without `modules.json` is pooled by the library's default, the mean, or as `1_Pooling` says.
    """
    if not exists(folder / MODULES_FILE):
        path = folder / "1_Pooling" / "config.json"
        return PoolingModules(
            _method(path, read_optional(path, folder), hidden_size) if exists(path) else "mean", (), False
        )
    modules = _listed(folder / MODULES_FILE)
    _check_order(folder, modules)
    size, method, dense = hidden_size, _METHODS["mean"], []
    for kind, name in modules:
        path = path_inside(folder, name, MODULES_FILE) / "config.json"
        values = read_optional(path, folder)
        if kind in ("Pooling", "Dense") and not values:
            raise UnreadableModelError(f"`{path}` is missing, which `{MODULES_FILE}` names. Fetch the folder again.")
        if kind == "Pooling":
            method = _method(path, values, hidden_size)
        elif kind == "Dense":
            dense.append(_dense(path, name, values, size))
            size = dense[-1].linear.out_features
        elif kind == "Normalize":
            check_keys(path, values, (), _EMBEDDING)
    return PoolingModules(method, tuple(dense), modules[-1][0] == "Normalize")


def behind_pooling(modules: PoolingModules) -> ClassifierSpec | None:
    """Return the dense layers as what a model computes of the pooled hidden state, or None."""
    return ClassifierSpec(modules.dense, None) if modules.dense else None


def check_keys(path: Path, values: dict[str, Any], read: Collection[str], allowed: dict[str, tuple[Any, ...]]) -> None:
    """Raise `UnsupportedModelArchitecture` for a key that is neither read nor has a value without effect.

    `allowed`: values of keys that change nothing here.
    """
    for name, value in values.items():
        if name not in read and not (name in allowed and value in allowed[name]):
            raise UnsupportedModelArchitecture(
                f"`{path}`: `{name}` is {str(value)[:80]!r}, which is not supported. Remove the key if vectors do not "
                "depend on it."
            )


def _listed(path: Path) -> list[tuple[str, str]]:
    """Return the last part of each module's type, and its folder. Dropout does nothing here."""
    try:
        entries = orjson.loads(read_text(path))
        found = [(str(entry["type"]).rpartition(".")[2], str(entry.get("path", ""))) for entry in entries]
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError):
        raise UnreadableModelError(f"`{path}` is not a list of modules with their types.") from None
    for entry in entries:
        check_keys(path, entry, ("idx", "name", "path", "type"), {"kwargs": ([], None)})
    return [each for each in found if each[0] != "Dropout"]


def _check_order(folder: Path, modules: list[tuple[str, str]]) -> None:
    kinds = [kind for kind, _ in modules]
    others = sorted(set(kinds) - set(_ORDER))
    if not others and kinds[:1] == ["Transformer"] and not modules[0][1]:
        once = all(kinds.count(kind) == 1 for kind in ("Transformer", "Pooling")) and kinds.count("Normalize") < 2
        if once and kinds == sorted(kinds, key=_ORDER.index):
            return
    what = f"the module `{others[0]}`" if others else f"the modules {', '.join(kinds) or 'none'} in this order"
    if not others and modules and modules[0][1]:
        what = f"its weights in `{modules[0][1]}`"
    raise UnsupportedModelArchitecture(
        f"`{folder}` has {what} ({MODULES_FILE}), which is not supported; Transformer (in the folder itself), "
        "Pooling, any number of Dense, and Normalize are, in this order."
    )


def _method(path: Path, values: dict[str, Any], hidden_size: int) -> PoolingMethod:
    check_keys(
        path, values, ("pooling_mode", *_FLAGS), {"include_prompt": (True,), **dict.fromkeys(_SIZES, (hidden_size,))}
    )
    mode = values.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else mode
    if modes is None:
        modes = [_FLAGS[name] for name in _FLAGS if values.get(name) is True] or ["mean"]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _METHODS:
        shown = ", ".join(map(str, modes)) if isinstance(modes, list) else str(modes)
        raise UnsupportedModelArchitecture(
            f"`{path}` pools by {shown[:80] or 'nothing'}; exactly one of {', '.join(_METHODS)} is supported."
        )
    return _METHODS[modes[0]]


def _dense(path: Path, name: str, values: dict[str, Any], size: int) -> DenseSpec:
    """Declare the dense layer of the module in the folder `name`, of `size` inputs."""
    read = ("out_features", "bias", "activation_function")
    check_keys(path, values, read, {"in_features": (size,), "use_residual": (False,), **_EMBEDDING})
    rows, bias, activation = values.get("out_features"), values.get("bias", True), values.get("activation_function")
    if type(rows) is not int or rows < 1 or type(bias) is not bool:
        raise UnreadableModelError(f"`{path}`: `out_features` must be a positive integer, and `bias` true or false.")
    kind = "Tanh" if activation is None else str(activation).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise UnsupportedModelArchitecture(
            f"`{path}`: `activation_function` {activation!r} is not supported; {', '.join(_ACTIVATIONS)} are."
        )
    linear = LinearSpec(size, (MatrixSpec(name=f"{name}.linear", rows=rows, bias=bias),))
    return DenseSpec(linear=linear, activation=_ACTIVATIONS[kind])
