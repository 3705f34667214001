"""The settings of an adapter, `adapter_config.json`: each key of PEFT's `LoraConfig` is used, has no effect on answers,
or is refused when it is set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pagemill_models.adapters.errors import unreadable, unsupported
from pagemill_models.adapters.limits import ADAPTER_CONFIG
from pagemill_models.files.json_file import read_object
from pagemill_protocol.source_errors import UnreadableModelError

USED = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "target_parameters", "modules_to_save", "base_model_name_or_path",
    "init_lora_weights",
})  # fmt: skip
WITHOUT_EFFECT = {
    **dict.fromkeys(("task_type", "auto_mapping", "peft_version", "revision", "inference_mode"), "describes the file"),
    **dict.fromkeys(("lora_dropout", "velora_config", "runtime_config"), "acts in training only"),
    **dict.fromkeys(("loftq_config", "eva_config", "corda_config", "lora_ga_config"), "belongs to `init_lora_weights`"),
    "bias": "trained biases are tensors, and are refused by their names",
    "fan_in_fan_out": "the stored order of a base's matrix; A and B have the same either way",
    "megatron_core": "the name of a module, read with `megatron_config`",
    "qalora_group_size": "read with `use_qalora`",
}
_TRAIN_WITHOUT = "Train an adapter without it."
REFUSED = {
    "use_dora": "Norms of merged weights (DoRA) are not computed. Merge the adapter into a copy of the model, or train "
    "it with use_dora=False.",
    "lora_bias": "Biases of B are not computed. Train the adapter with lora_bias=False.",
    "trainable_token_indices": "Trained rows of embeddings are not served. Train LoRA on the embedding.",
    "layer_replication": "A model with repeated layers is another model. Merge the adapter into a copy of it.",
    "alora_invocation_tokens": f"Adapters that begin within a prompt are not served. {_TRAIN_WITHOUT}",
    "arrow_config": f"Routing between adapters is not served. {_TRAIN_WITHOUT}",
    "ensure_weight_tying": f"One pair of matrices for embedding and head is not served. {_TRAIN_WITHOUT}",
    "megatron_config": f"Layers of Megatron are not served. {_TRAIN_WITHOUT}",
    **dict.fromkeys(("use_qalora", "use_bdlora", "kasa_config", "monteclora_config"), _TRAIN_WITHOUT),
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights`, or their beginnings, with which training starts from changed weights of the base."""


class PeftSettings(NamedTuple):
    rank: int
    alpha: float
    rank_stabilized: bool
    """Whether the scale is alpha / sqrt(rank) instead of alpha / rank."""
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    """By patterns of names of modules."""
    target_modules: str | list[str] | None
    """A regular expression or `all-linear`; or names or their ends."""
    exclude_modules: str | list[str] | None
    target_parameters: list[str]
    layers: list[int] | None
    """The only layers; None: all."""
    layer_lists: list[str]
    """Names of the lists of layers of which `layers` has indices; none: of any."""
    base: str | None
    """The base model's name, as the trainer wrote it."""

    def of(self, module: str, parameter: str | None = None) -> tuple[int, float]:
        """Return rank and scale of a module, or of one of its parameters."""
        key = module if parameter is None else f"{module}.{parameter}"
        rank = _by_pattern(self.ranks, key, self.rank)
        alpha = _by_pattern(self.alphas, key, self.alpha)
        return rank, alpha / (rank**0.5 if self.rank_stabilized else rank)

    def targets(self, module: str) -> bool:
        """Whether PEFT adapts a module of this name. Raises `AdapterError` for an invalid expression."""
        if _matches(self.exclude_modules, module):
            return False
        if isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear":
            return True
        return _matches(self.target_modules, module) and (
            isinstance(self.target_modules, str) or self._has_layer(module)
        )

    def parameters_of(self, module: str) -> list[str]:
        """Return the last names of the module's parameters that are adapted."""
        found = []
        for target in self.target_parameters:
            parameter = target.rpartition(".")[2]
            if _is_or_ends(f"{module}.{parameter}", target):
                found.append(parameter)
        return found

    def _has_layer(self, module: str) -> bool:
        if self.layers is None:
            return True
        patterns = [rf"(?:^|.*?\.){each}\.(\d+)\." for each in self.layer_lists] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for match in (re.match(each, module) for each in patterns) if match), None)
        return found is not None and int(found[1]) in self.layers


def read_settings(folder: Path) -> PeftSettings:
    """Read the settings. Raises `AdapterError`."""
    try:
        values = read_object(folder / ADAPTER_CONFIG)
    except UnreadableModelError as error:
        raise unreadable(error.message) from None
    _check_keys(values)
    rank = values.get("r", 8)
    if type(rank) is not int or rank < 1:
        raise _wrong("r", rank, "a positive integer")
    layers = values.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers
    if layers is not None and not (isinstance(layers, list) and all(type(each) is int for each in layers)):
        raise _wrong("layers_to_transform", layers, "a list of indices of layers")
    base = values.get("base_model_name_or_path")
    return PeftSettings(
        rank=rank,
        alpha=_number("lora_alpha", values.get("lora_alpha", 8)),
        rank_stabilized=values.get("use_rslora") is True,
        ranks={key: int(_number(f"rank_pattern.{key}", each)) for key, each in _object(values, "rank_pattern").items()},
        alphas={key: _number(f"alpha_pattern.{key}", each) for key, each in _object(values, "alpha_pattern").items()},
        target_modules=_names(values, "target_modules", None),
        exclude_modules=_names(values, "exclude_modules", None),
        target_parameters=_list(values, "target_parameters"),
        layers=layers or None,
        layer_lists=_list(values, "layers_pattern"),
        base=base if isinstance(base, str) else None,
    )


def _check_keys(values: Mapping[str, Any]) -> None:
    if (kind := values.get("peft_type", "LORA")) != "LORA":
        raise unsupported(f"`{ADAPTER_CONFIG}` has peft_type `{kind}`. Only LORA is served; train a LoRA adapter.")
    for key, value in values.items():
        if key in USED or key in WITHOUT_EFFECT or value in (None, False, 0, "", [], {}):
            continue
        remedy = REFUSED.get(key, "This key is not known here, and it may change answers. Remove it if it does not.")
        raise unsupported(f"`{ADAPTER_CONFIG}` sets `{key}`. {remedy}")
    start = values.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise unsupported(
            f"`{ADAPTER_CONFIG}` has init_lora_weights `{start}`: the adapter was trained on changed weights of the "
            "base. Convert it to plain LoRA: `save_pretrained` with path_initial_model_for_weight_conversion."
        )


def _by_pattern(found: Mapping[str, Any], name: str, default: Any) -> Any:
    return next((value for key, value in found.items() if _match(rf"(.*\.)?({key})$", name)), default)


def _matches(targets: str | list[str] | None, module: str) -> bool:
    if isinstance(targets, str):
        return _match(f"(?:{targets})\\Z", module)
    return any(_is_or_ends(module, each) for each in targets or ())


def _is_or_ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _match(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise unreadable(f"`{ADAPTER_CONFIG}` has an invalid regular expression `{pattern}`: {error}.") from None


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < 1e9:
        raise _wrong(key, value, "a positive number")
    return float(value)


def _object(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key) or {}
    if not isinstance(found, dict):
        raise _wrong(key, found, "an object")
    return found


def _list(values: Mapping[str, Any], key: str) -> list[str]:
    found = _names(values, key, [])
    return [found] if isinstance(found, str) else found or []


def _names(values: Mapping[str, Any], key: str, default: list[str] | None) -> str | list[str] | None:
    found = values.get(key)
    if found is None:
        return default
    if isinstance(found, str) or (isinstance(found, list) and all(isinstance(each, str) for each in found)):
        return found
    raise _wrong(key, found, "a string or a list of strings")


def _wrong(key: str, value: Any, wanted: str) -> Exception:
    return unreadable(f"`{ADAPTER_CONFIG}` has {key} = `{value!r}`; it must be {wanted}.")
