"""ModelSpec of a Hugging Face folder: config.json for the shape, safetensors headers for the sizes.

Accepts the old keys (`rope_theta`, `rope_scaling`, `torch_dtype`) and those of transformers 5 (`rope_parameters`,
`dtype`). Defaults for missing keys are those of the architecture's configuration class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagemill_protocol.json_file import read_object
from pagemill_protocol.model_spec import SUPPORTED_ARCHITECTURES, ModelSpec, checked, rope_refusals, unsupported
from pagemill_protocol.rope_settings import read_rope
from pagemill_protocol.safetensors_header import read_folder_headers
from pagemill_protocol.sources import UnreadableModelError

_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DEFAULT_CONTEXT = {"LlamaForCausalLM": 2048, "MistralForCausalLM": 131_072}
_HEAD = "lm_head.weight"


def spec_from_folder(folder: Path) -> ModelSpec:
    """Raises `SourceError`; the numbers are not yet range-checked."""
    config = _Config(folder)
    tensors = read_folder_headers(folder)
    tied = config.flag("tie_word_embeddings", False)
    counted = [tensor for tensor in tensors.values() if not (tied and tensor.name == _HEAD)]
    return config.spec(
        tied=tied,
        weight_bytes=sum(tensor.num_bytes for tensor in counted),
        num_parameters=sum(tensor.num_elements for tensor in counted),
    )


def check_config(folder: Path) -> None:
    """Raises `SourceError` for what `config.json` alone shows, while no weights are there yet."""
    checked(_Config(folder).spec(tied=False, weight_bytes=0, num_parameters=0), folder)


class _Config:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "config.json"
        self._values = read_object(self._path)
        self._architecture = self._find_architecture(folder)

    def spec(self, *, tied: bool, weight_bytes: int, num_parameters: int) -> ModelSpec:
        architecture = self._architecture
        num_heads, hidden_size = self._int("num_attention_heads"), self._int("hidden_size")
        num_layers = self._int("num_hidden_layers")
        context = self._int("max_position_embeddings", _DEFAULT_CONTEXT.get(architecture, 32_768))
        with rope_refusals(architecture, self._path):
            rope = read_rope(self._values, context)
        window, window_layers = self._sliding_window(num_layers)
        biased = self.flag("attention_bias", False)
        self._check_activation()
        return ModelSpec(
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=self._int("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=self._int("num_key_value_heads", num_heads),
            head_dim=self._int(
                "head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden_size // (num_heads or 1)
            ),
            vocab_size=self._int("vocab_size"),
            max_position_embeddings=context,
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            rms_norm_eps=self._float("rms_norm_eps", 1e-6),
            tie_word_embeddings=tied,
            attention_bias=architecture == "Qwen2ForCausalLM" or (biased and architecture != "MistralForCausalLM"),
            attention_output_bias=biased and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
            mlp_bias=self.flag("mlp_bias", False) and architecture == "LlamaForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=window,
            sliding_window_layers=window_layers,
            dtype=self._dtype(),
            quantization=self._quantization(),
            weights_format="safetensors",
            weight_bytes=weight_bytes,
            num_parameters=num_parameters,
        )

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self._wrong(name, value, "true or false")

    def _find_architecture(self, folder: Path) -> str:
        declared = self._values.get("architectures")
        names = [name for name in declared if isinstance(name, str)] if isinstance(declared, list) else []
        model_type = self._values.get("model_type")
        if not names and isinstance(model_type, str):
            names = [_BY_MODEL_TYPE.get(model_type, model_type)]
        if not names:
            raise UnreadableModelError(f"`{self._path}` names neither `architectures` nor `model_type`.")
        for name in names:
            if name in SUPPORTED_ARCHITECTURES:
                return name
        raise unsupported(names[0], folder)

    def _sliding_window(self, num_layers: int) -> tuple[int | None, list[int]]:
        if self._architecture == "LlamaForCausalLM":
            return None, []
        if self._architecture == "MistralForCausalLM":
            window = self._optional_int("sliding_window", 4096)
            return window, list(range(num_layers)) if window is not None else []
        if not self.flag("use_sliding_window", False):
            return None, []
        window = self._optional_int("sliding_window", 4096)
        kinds = self._values.get("layer_types")
        if isinstance(kinds, list):
            layers = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
        else:
            layers = list(range(self._int("max_window_layers", 28), num_layers))
        return (window, layers) if window is not None and layers else (None, [])

    def _check_activation(self) -> None:
        activation = self._values.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise unsupported(self._architecture, self._path.parent, f" with the activation `{activation}`")

    def _dtype(self) -> str | None:
        value = self._values.get("dtype") or self._values.get("torch_dtype")
        return value.removeprefix("torch.") if isinstance(value, str) else None

    def _quantization(self) -> str | None:
        value = self._values.get("quantization_config")
        return str(value.get("quant_method", "unknown")) if isinstance(value, dict) else None

    def _int(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "an integer")
        return value

    def _optional_int(self, name: str, default: int) -> int | None:
        return None if name in self._values and self._values[name] is None else self._int(name, default)

    def _float(self, name: str, default: float) -> float:
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, value, "a number")
        return float(value)

    def _wrong(self, name: str, value: Any, wanted: str) -> UnreadableModelError:
        problem = "is missing" if value is None else f"is {str(value)[:80]!r}"
        return UnreadableModelError(f"`{self._path}`: `{name}` {problem}; it must be {wanted}.")
