"""ModelSpec of a GGUF file, from its metadata and tensor table. Key names: docs/gguf.md of github.com/ggml-org/ggml."""

from __future__ import annotations

from collections import Counter

import numpy as np

from pagemill_protocol.gguf_file import GGMLType, GGUFError, GGUFFile
from pagemill_protocol.model_spec import ModelSpec, rope_refusals, unsupported
from pagemill_protocol.rope_scaling import RopeError, RopeScaling, UnsupportedRopeError
from pagemill_protocol.rope_settings import DEFAULT_THETA, read_gguf_scaling

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.F64)
_EMBEDDING, _HEAD, _ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_LONG_ROPE = ("rope_factors_long.weight", "rope_factors_short.weight")


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """Raises `SourceError`; the numbers are not yet range-checked."""
    return _Reader(file).spec()


class _Reader:
    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        prefix = file.get("general.architecture", str)
        if prefix is None:
            raise GGUFError(f"`{file.path}` has no `general.architecture`. Convert the model again.")
        if prefix not in _ARCHITECTURES:
            raise unsupported(prefix, file.path)
        self._prefix: str = prefix
        if self._number("expert_count", 0):
            raise unsupported(prefix, file.path, " with experts")

    def spec(self) -> ModelSpec:
        tensors = self._file.tensors
        num_heads, hidden_size = self._size("attention.head_count"), self._size("embedding_length")
        num_layers, head_dim = self._size("block_count"), self._head_dim(hidden_size, num_heads)
        context = self._size("context_length")
        window = self._number("attention.sliding_window", 0) or None
        biased = "blk.0.attn_q.bias" in tensors
        theta = _shortest(self._number("rope.freq_base", DEFAULT_THETA))
        return ModelSpec(
            architecture="MistralForCausalLM" if window and self._prefix == "llama" else _ARCHITECTURES[self._prefix],
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=self._size("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=self._size("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            vocab_size=self._vocab_size(),
            max_position_embeddings=context,
            rope_theta=theta,
            rope_scaling=self._rope_scaling(theta, context, head_dim),
            rms_norm_eps=_shortest(self._number("attention.layer_norm_rms_epsilon", 1e-6)),
            tie_word_embeddings=_HEAD not in tensors,
            attention_bias=biased,
            attention_output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            sliding_window=int(window) if window else None,
            sliding_window_layers=list(range(num_layers)) if window else [],
            quantization=self._main_type(),
            weights_format="gguf",
            weight_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
            num_parameters=sum(tensor.num_elements for name, tensor in tensors.items() if name != _ROPE_FACTORS),
        )

    def _head_dim(self, hidden_size: int, num_heads: int) -> int:
        head_dim = self._size("attention.key_length", hidden_size // (num_heads or 1))
        if self._size("attention.value_length", head_dim) != head_dim:
            raise unsupported(self._prefix, self._file.path, " with keys and values of different lengths")
        if self._size("rope.dimension_count", head_dim) != head_dim:
            raise unsupported(self._prefix, self._file.path, " with a partial rotary embedding")
        return head_dim

    def _vocab_size(self) -> int:
        embedding = self._file.tensors.get(_EMBEDDING)
        if embedding is None:
            raise GGUFError(f"`{self._file.path}` has no tensor `{_EMBEDDING}`. It does not hold a whole model.")
        return embedding.shape[0]

    def _rope_scaling(self, theta: float, context: int, head_dim: int) -> RopeScaling | None:
        with rope_refusals(self._prefix, self._file.path):
            scaling = read_gguf_scaling(self._file.metadata, self._prefix, theta, context)
            self._check_divisors(head_dim, scaling)
        return scaling

    def _check_divisors(self, head_dim: int, scaling: RopeScaling | None) -> None:
        """The frequencies' divisors, which some converters write as a tensor in place of `llama3` scaling."""
        for name in _LONG_ROPE:
            if name in self._file.tensors:
                raise UnsupportedRopeError(f"the rope scaling `longrope` (tensor `{name}`)")
        tensor = self._file.tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return
        if scaling is not None:
            raise UnsupportedRopeError(f"`{self._prefix}.rope.scaling.type` beside the tensor `{_ROPE_FACTORS}`")
        if tensor.shape != (head_dim // 2,) or tensor.ggml_type is not GGMLType.F32:
            shape = " x ".join(map(str, tensor.shape))
            raise RopeError(f"`{_ROPE_FACTORS}` is {shape} {tensor.ggml_type.name}; it must be {head_dim // 2} F32.")
        divisors = self._file.data(_ROPE_FACTORS).view(np.float32)
        if not (np.isfinite(divisors) & (divisors > 0)).all():
            raise RopeError(f"`{_ROPE_FACTORS}` holds {divisors.min()}; its values must be numbers greater than 0.")

    def _main_type(self) -> str | None:
        """The storage type that holds most weights."""
        sizes: Counter[GGMLType] = Counter()
        for name, tensor in self._file.tensors.items():
            if name != _EMBEDDING:
                sizes[tensor.ggml_type] += tensor.num_elements
        main = sizes.most_common(1)[0][0] if sizes else None
        return None if main is None or main in _FLOATS else main.name

    def _size(self, name: str, default: int | None = None) -> int:
        """One integer; a list of equal ones (a value per layer) counts as one."""
        key = f"{self._prefix}.{name}"
        value = self._file.get(key, (int, list), default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise unsupported(self._prefix, self._file.path, f" with layers of different `{name}`")
            value = value[0]
        if value is None or isinstance(value, bool) or not isinstance(value, int):
            raise GGUFError(f"`{self._file.path}` has no usable `{key}`. Convert the model again.")
        return value

    def _number(self, name: str, default: float) -> float:
        value = self._file.get(f"{self._prefix}.{name}", (int, float), default)
        return float(value)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: the file's 9.9999997e-06 is what the author wrote as 1e-05."""
    return float(str(np.float32(value)))
