"""Names of an adapter's tensors, `MODULE.lora_A.weight`, and of the modules of a declared model that they mean."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from pagemill_models.declaration.declaration import DecoderSpec, MoESpec
from pagemill_models.sharding.linears import LinearUse, linears

Side = Literal["A", "B"]

_ROOT = "base_model.model."
_LOW = re.compile(
    r"(?P<module>.+?)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.(?!weight$|bias$)[^.]+)?(?P<end>\.weight)?"
)
_COPY = re.compile(r"(?P<module>.+?)(?:\.base_layer|\.modules_to_save(?:\.[^.]+)?|\.original_module)?\.weight")
_WRAPPERS = ("base_model", "model", "backbone", "language_model", "text_model", "transformer", "module", "_orig_mod")
"""First parts of names that classes around a decoder add, and others leave out."""


class LowTensor(NamedTuple):
    """A or B of a module."""

    module: str
    """As the trainer's model names it."""
    side: Side
    depth: int
    """Of parameters of one module: wrappers around this one."""


class MatrixPlace(NamedTuple):
    """The rows of a linear layer that a module has."""

    use: LinearUse
    first: int
    rows: int


def low_tensor(name: str) -> LowTensor | None:
    """Return what a tensor is; None: neither A nor B."""
    match = _LOW.fullmatch(name.removeprefix(_ROOT))
    if match is None or (match["end"] is None) != (match["embedding"] is not None):
        return None
    module = match["module"]
    bare = module
    while bare.endswith(".base_layer"):
        bare = bare.removesuffix(".base_layer")
    return LowTensor(bare, "A" if match["side"] == "A" else "B", (len(module) - len(bare)) // len(".base_layer"))


def copied_module(name: str) -> str | None:
    """Return the module of which a tensor may be a saved copy."""
    match = _COPY.fullmatch(name.removeprefix(_ROOT))
    return None if match is None else match["module"]


class Modules:
    """The modules of a declared model by the names that trainers use."""

    def __init__(self, decoder: DecoderSpec) -> None:
        self._places: dict[str, list[MatrixPlace]] = {}
        self._stacks: dict[str, tuple[list[LinearUse], list[LinearUse]]] = {}
        self._stored: dict[str, str] = {}
        head, of_experts = decoder.head, dict[tuple[int | None, str], list[LinearUse]]()
        for use in linears(decoder):
            if use.expert is not None:
                of_experts.setdefault((use.layer, use.role), []).append(use)
            first = 0
            for part in use.spec.parts:
                name = head.name if use.role == "head" and head is not None else part.name
                rows = use.spec.in_features if use.is_table else part.rows
                for alias in _aliases(bare(name)):
                    self._places.setdefault(alias, []).append(MatrixPlace(use, first, rows))
                    self._stored[alias] = f"{part.name}.weight"
                first += part.rows
        for index, layer in enumerate(decoder.layers):
            for mixture in (block for block in layer.blocks() if isinstance(block, MoESpec)):
                name = mixture.experts[0].up.parts[0].name.partition(".experts.")[0] + ".experts"
                stacks = of_experts.get((index, "expert_up"), []), of_experts.get((index, "expert_down"), [])
                self._stacks.update(dict.fromkeys(_aliases(bare(name)), stacks))

    def place(self, module: str) -> MatrixPlace | None:
        """Return the place of a matrix; None: no linear layer has this name."""
        found = self._places.get(bare(module))
        return None if found is None else found[0]

    def stored_name(self, module: str) -> str | None:
        """Return the name of the module's matrix in the model's files."""
        return self._stored.get(bare(module))

    def stack(self, module: str, parameter: str) -> list[LinearUse] | None:
        """Return the layers of all experts whose matrices are one parameter of a module."""
        found = self._stacks.get(bare(module))
        if found is None:
            return None
        return {"gate_up_proj": found[0], "up_proj": found[0], "down_proj": found[1]}.get(parameter)

    def matrices(self) -> list[str]:
        """Return the names, without wrappers, of all matrices outside of experts."""
        return [name for name, places in self._places.items() if places[0].use.expert is None]


def bare(module: str) -> str:
    """Return the name without wrappers."""
    first, _, rest = module.partition(".")
    while rest and first in _WRAPPERS:
        module = rest
        first, _, rest = module.partition(".")
    return module


def _aliases(name: str) -> list[str]:
    """Mixtral's checkpoints call a block by another name than the classes of newer libraries."""
    return [name, name.replace(".block_sparse_moe.", ".mlp.")] if ".block_sparse_moe." in name else [name]
