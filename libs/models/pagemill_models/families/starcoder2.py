"""StarCoder2 (arXiv 2402.19173): Llama with layer norms, biases and an MLP without a gate."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_layer_norms, with_mlp
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, MLPSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear, plain_mlp
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(
        config,
        default_context=4096,
        default_tied=True,
        epsilon=("norm_epsilon", 1e-5),
        default_activation="gelu_pytorch_tanh",
    )
    biased = config.flag("use_bias", True)
    numbers = replace(numbers, attention_bias=biased, attention_output_bias=biased)
    plain = decoder(numbers.with_window(config.window(default=None), range(numbers.num_layers)))

    def mlp(name: str, gated: MLPSpec) -> MLPSpec:
        size, inner = numbers.hidden_size, numbers.intermediate_size
        up, down = (
            linear(size, (f"{name}.mlp.c_fc", inner), bias=biased),
            linear(inner, (f"{name}.mlp.c_proj", size), bias=biased),
        )
        return plain_mlp(up, down, gated.activation)

    return with_mlp(with_layer_norms(plain), mlp)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return read_config(GGUFConfig(values, use_bias=values.has("blk.0.attn_q.bias")))


_NAMES = gguf_names(interleaved=False)
_PLAIN_MLP = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
FAMILY = Family(read_config, read_gguf, _NAMES._replace(in_layer=_NAMES.in_layer | _PLAIN_MLP))
