"""ModelSpec: the shape of a decoder model, read from its headers in milliseconds, before any weight is loaded.

The plan sizes pods with it, the engine builds the model and the KV cache from it. `spec_from_config` fills it from a
Hugging Face folder, `spec_from_gguf` from a GGUF file. Names are those of Hugging Face configurations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from pagemill_protocol.rope_scaling import RopeError, RopeScaling, UnsupportedRopeError
from pagemill_protocol.sources import SourceError, UnreadableModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_LIMITS = {
    "num_layers": 4096,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30,
}
"""No model is near these; a damaged header often is beyond them."""


class UnsupportedModelArchitecture(SourceError):
    """The files are fine, but no model definition here fits them."""

    def __init__(self, message: str) -> None:
        super().__init__("model.source", message, reason="UnsupportedArchitecture")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str
    """Hugging Face class name, for example `LlamaForCausalLM`."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding and of the logits."""
    max_position_embeddings: int
    """Tokens of context the model was made for."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    """`None`: plain rotary embedding."""
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """On the query, key and value projections."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head."""
    sliding_window: int | None = None
    """Tokens that a layer of `sliding_window_layers` looks back, itself included."""
    sliding_window_layers: list[int] = []
    dtype: str | None = None
    """Type of the stored weights (`bfloat16`), where one is declared."""
    quantization: str | None = None
    """Quantization method or main GGUF storage type; `None`: plain floats."""
    weights_format: Literal["safetensors", "gguf"] = "safetensors"
    weight_bytes: int = 0
    """Stored size of all tensors."""
    num_parameters: int = 0
    """Tied embeddings counted once."""

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def layer_sliding_window(self, layer: int) -> int | None:
        """The window of one layer; `None`: it attends to everything."""
        return self.sliding_window if layer in self.sliding_window_layers else None


def load_model_spec(path: str | Path) -> ModelSpec:
    """The spec of a `.gguf` file or Hugging Face folder. Raises `SourceError`."""
    path = Path(path)
    if path.is_dir():
        from pagemill_protocol.spec_from_config import spec_from_folder

        return checked(spec_from_folder(path), path)
    from pagemill_protocol.gguf_file import GGUFFile
    from pagemill_protocol.spec_from_gguf import spec_from_gguf

    return checked(spec_from_gguf(GGUFFile(path)), path)


def checked(spec: ModelSpec, path: Path) -> ModelSpec:
    """`spec`, or an error that names the number that cannot be."""
    for name, limit in _LIMITS.items():
        value = getattr(spec, name)
        if not 0 < value <= limit:
            raise UnreadableModelError(f"`{path}` declares {name} = {value}; it must be from 1 to {limit}.")
    if spec.num_heads % spec.num_kv_heads:
        raise UnreadableModelError(
            f"`{path}` declares {spec.num_heads} attention heads, not a multiple of its {spec.num_kv_heads} KV heads."
        )
    if spec.head_dim % 2:
        raise UnreadableModelError(f"`{path}` declares head_dim = {spec.head_dim}; rotary embedding needs an even one.")
    if not 0 < spec.rms_norm_eps < 1 or not 0 < spec.rope_theta < float("inf"):
        raise UnreadableModelError(
            f"`{path}` declares rms_norm_eps = {spec.rms_norm_eps} and rope_theta = {spec.rope_theta}; "
            "both must be positive and finite."
        )
    if spec.sliding_window is not None and spec.sliding_window < 1:
        raise UnreadableModelError(f"`{path}` declares sliding_window = {spec.sliding_window}; it must be positive.")
    return spec


def unsupported(architecture: str, path: Path, detail: str = "") -> UnsupportedModelArchitecture:
    """The error for a model nobody here can run; names what it is and what would work."""
    return UnsupportedModelArchitecture(
        f"`{path}` has the architecture `{architecture}`{detail}, which is not supported. "
        f"Supported: {', '.join(SUPPORTED_ARCHITECTURES)}."
    )


@contextmanager
def rope_refusals(architecture: str, path: Path) -> Iterator[None]:
    """Rope settings that cannot be used, as errors of the model at `path`."""
    try:
        yield
    except UnsupportedRopeError as error:
        raise unsupported(architecture, path, f" with {error}") from None
    except RopeError as error:
        raise UnreadableModelError(f"`{path}`: {error}") from None
