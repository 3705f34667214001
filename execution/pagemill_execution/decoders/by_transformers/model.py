"""A decoder of `transformers` with the interface of `models.Decoder`: hidden states of a flattened batch, then logits.

The class comes from the installed package, never from the model's files, and its weights from safetensors only. Before
serving, one token is computed without a cache, to check each layer's attention.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from pagemill_execution.decoders.by_transformers.attention import NAME, AttentionStep, give_step, register
from pagemill_execution.decoders.on_torch.context import ALONE, ForwardContext, ProductContext
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.registry import Ops
from pagemill_models.spec.model_spec import ModelSpec

_MOST_MISSING = 2
"""How many times as many parameters as the files hold a class may have: one that is tied is in the files once."""
_MAX_SHOWN = 200


class TransformersDecoder:
    classifier = None

    def __init__(self, path: Path, spec: ModelSpec, ops: Ops, dtype: torch.dtype) -> None:
        """Load the model with its weights. Raises `LoadError`."""
        self.spec = spec
        self.dtype = dtype
        self._step = AttentionStep(ops)
        self._causal = _load(path, spec, dtype).to(ops.device)
        give_step(self._causal, self._step)
        self._base: Any = self._causal.base_model
        # The head's class scales and caps logits in its own ways: it runs over hidden states that were computed before.
        setattr(self._causal, self._causal.base_model_prefix, _Passthrough())
        self._check_attention()

    def weight_layers(self) -> Iterator[_Weights]:
        yield _Weights(nn.ModuleList((self._base, self._causal)))

    def __call__(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Return hidden states like `Decoder.__call__`."""
        self._step.context = context
        try:
            return self._hidden(token_ids, context.positions)
        finally:
            self._step.context = None

    def compute_logits(self, hidden: Tensor, context: ProductContext = ALONE) -> Tensor:
        logits: Tensor = self._causal(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()

    def _hidden(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        found = self._base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = found.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def _check_attention(self) -> None:
        """Compute one token. Raises `LoadError` for attention of another kind than the cache was planned for."""
        self._step.seen = []
        token = torch.zeros(1, dtype=torch.int64, device=self._step.ops.device)
        try:
            self.compute_logits(self._hidden(token, token))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise _unsupported(self.spec, f"its class does not compute a first token: {error}") from error
        expected = [(each.num_heads, each.num_kv_heads, each.head_dim, ()) for each in self.spec.decoder.attentions()]
        seen = self._step.seen
        if [each[1:] for each in seen] != expected or [each.layer for each in seen] != list(range(len(expected))):
            asked = sorted({name for each in seen for name in each.extras})
            what = f"asks for {', '.join(asked)}" if asked else "has layers that keep other state than keys and values"
            raise _unsupported(self.spec, f"its attention {what}")


class _Passthrough(nn.Module):
    """Replaces the layers and returns its input."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)


class _Hidden(SimpleNamespace):
    """What a head's class reads of its layers' output: hidden states. Everything else, as routers' logits, is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Weights:
    """A module's weights with the interface of one layer of `on_torch`."""

    def __init__(self, module: nn.Module) -> None:
        self._held = SimpleNamespace(
            **{name.replace(".", "_"): each for name, each in module.named_parameters()},
            num_bytes=sum(each.nbytes for each in module.parameters()),
        )

    def held(self) -> Any:
        return self._held


def _load(path: Path, spec: ModelSpec, dtype: torch.dtype) -> Any:
    register()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check_size(path, spec)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=NAME, use_safetensors=True, local_files_only=True,
                trust_remote_code=False,
            )  # fmt: skip
    except LoadError:
        raise
    except Exception as error:  # a class may raise anything for a config.json of another form
        why = f"{type(error).__name__}: {str(error)[:_MAX_SHOWN]}"
        raise _unsupported(spec, f"transformers {transformers.__version__} does not load it: {why}") from error
    if not model._supports_attention_backend or model._is_stateful:
        raise _unsupported(spec, "its class in transformers has an attention or a state of its own")
    model.config.output_router_logits = False  # the head's class would compute a loss from them
    model.train(False)
    return model.requires_grad_(False)


def _check_size(path: Path, spec: ModelSpec) -> None:
    """Raise `LoadError` for a config.json that asks for many more parameters than the files hold.

    transformers makes parameters that the files lack or have in another shape, whatever their size.
    """
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        make: Any = transformers.AutoModelForCausalLM.from_config  # it has no types
        model = make(config, trust_remote_code=False)
    wanted = sum(each.numel() for each in model.parameters())
    if wanted > _MOST_MISSING * spec.num_parameters:
        what = f"{wanted} parameters by its config.json, and {spec.num_parameters} in its files"
        raise _unsupported(spec, f"it has {what}")


def _unsupported(spec: ModelSpec, why: str) -> LoadError:
    return LoadError(
        "UnsupportedArchitecture",
        f"`{spec.architecture}` is no family of Pagemill's and does not run by transformers either: {why}.",
    )
