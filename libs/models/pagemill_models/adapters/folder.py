"""Reads an adapter's folder: which tensors add to which linear layers, and which are copies of the base's.

Every tensor is used or the adapter is refused by that tensor's name. Values are read by the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pagemill_models.adapters.errors import AdapterError, unreadable, unsupported
from pagemill_models.adapters.gguf_adapter import SAME_FILES, read_gguf_adapter
from pagemill_models.adapters.limits import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from pagemill_models.adapters.names import LowTensor, Modules, bare, copied_module, low_tensor
from pagemill_models.adapters.parts import (
    AdapterFiles,
    LowRank,
    SavedCopy,
    check_once,
    check_rank,
    other_shape,
    refused_tensor,
)
from pagemill_models.adapters.settings import PeftSettings, read_settings
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.files.safetensors_header import TensorHeader, read_header
from pagemill_models.sharding.linears import LinearUse
from pagemill_protocol.source_errors import UnreadableModelError

_FLOATS = ("F32", "F16", "BF16")
_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""Matrices of all experts that one module may have as parameters, in the order in which PEFT wraps them."""
_WEIGHT = "weight"
"""The parameter that is the matrix of a linear layer."""


def read_adapter(folder: Path, decoder: DecoderSpec, max_rank: int) -> AdapterFiles:
    """Read settings and names of a folder, or of a GGUF file. Raises `AdapterError`.

    `max_rank`: the largest rank that the engine has room for.
    """
    path = _weights_file(folder)
    if path.suffix == ".gguf":
        return read_gguf_adapter(path, decoder, max_rank)
    if decoder.folded:
        raise unsupported(f"The base's GGUF file has factors of the model in its matrices. {SAME_FILES}")
    settings = read_settings(folder)
    try:
        headers = read_header(path)
    except UnreadableModelError as error:
        raise unreadable(error.message) from None
    reader = _Reader(settings, Modules(decoder), max_rank)
    parts, copies = reader.read(headers)
    return AdapterFiles(path, settings.base, parts, copies, headers)


def files_of(folder: Path) -> list[Path]:
    """Return what is read of a folder, or of a GGUF file. Raises `AdapterError`."""
    path = _weights_file(folder)
    return [path] if path.suffix == ".gguf" else [folder / ADAPTER_CONFIG, path]


def another_base(files: AdapterFiles, model: str) -> str | None:
    """Return a warning if the adapter names another base than `model`, which may have been moved or renamed."""
    base = files.base
    if not base or Path(base).name.lower() == Path(model).name.lower():
        return None
    return (
        f"`{files.path.parent}` was trained on `{base}`, and this engine serves `{model}`. Its matrices fit; check "
        "that both are the same model."
    )


def _weights_file(folder: Path) -> Path:
    if folder.suffix == ".gguf" and folder.is_file():
        return folder
    if not folder.is_dir():
        raise AdapterError("AdapterNotFound", f"`{folder}` is not a folder. Name the folder that PEFT wrote.")
    if (folder / ADAPTER_WEIGHTS).exists():
        return folder / ADAPTER_WEIGHTS
    if len(converted := list(folder.glob("*.gguf"))) == 1:
        return converted[0]
    if (folder / "adapter_model.bin").exists():
        raise unsupported(
            f"`{folder}` has its weights in `adapter_model.bin`, a pickle, which could run code. Save it again with "
            "save_pretrained(..., safe_serialization=True)."
        )
    raise AdapterError("AdapterNotFound", f"`{folder}` has no `{ADAPTER_WEIGHTS}`. Name the folder that PEFT wrote.")


class _Pair(NamedTuple):
    name: str
    low: LowTensor
    a: TensorHeader
    b: TensorHeader


class _Reader:
    def __init__(self, settings: PeftSettings, modules: Modules, max_rank: int) -> None:
        self._settings, self._modules, self._max_rank = settings, modules, max_rank

    def read(self, headers: list[TensorHeader]) -> tuple[list[LowRank], list[SavedCopy]]:
        lows: dict[tuple[str, int], dict[str, tuple[LowTensor, TensorHeader]]] = {}
        copies = []
        for header in headers:
            low = low_tensor(header.name)
            if low is None:
                copies.append(self._copy(header))
                continue
            if header.dtype not in _FLOATS or len(header.shape) != 2:
                has = f"has type {header.dtype} and shape {list(header.shape)}"
                raise refused_tensor(header, f"{has}; it must be a matrix of float32, float16 or bfloat16")
            sides = lows.setdefault((low.module, low.depth), {})
            if low.side in sides:
                raise refused_tensor(header, f"is a second {low.side} of `{low.module}`")
            sides[low.side] = (low, header)
        pairs = [_pair(sides) for sides in lows.values()]
        if not pairs:
            raise unreadable(f"`{ADAPTER_WEIGHTS}` has no tensor of LoRA, such as `...q_proj.lora_A.weight`.")
        parts = [part for pair in pairs for part in self._parts(pair)]
        check_once(parts)
        self._check_none_missing(parts)
        return parts, copies

    def _copy(self, header: TensorHeader) -> SavedCopy:
        if header.name.endswith(".bias"):
            raise refused_tensor(header, "is a trained bias. Train the adapter with bias='none' and lora_bias=False")
        if "lora_magnitude_vector" in header.name:
            raise refused_tensor(header, "belongs to DoRA. Train the adapter with use_dora=False")
        module = copied_module(header.name)
        stored = None if module is None else self._modules.stored_name(module)
        if stored is None or header.dtype not in _FLOATS:
            raise refused_tensor(header, "is no matrix of LoRA, and no copy of a matrix of this model")
        return SavedCopy(header, stored)

    def _parts(self, pair: _Pair) -> Iterator[LowRank]:
        place = self._modules.place(pair.low.module)
        if place is None:
            yield from self._of_experts(pair)
            return
        module = pair.low.module
        # Targets without a module, such as `gate_up_proj` of experts, end the name of a parameter of any module.
        parameter = _WEIGHT if _WEIGHT in self._settings.parameters_of(module) else None
        if parameter is None and not self._settings.targets(module):
            raise refused_tensor(pair.a, f"belongs to a module that `{ADAPTER_CONFIG}` does not target")
        rank, scale = self._settings.of(module, parameter)
        check_rank(pair.name, rank, self._max_rank)
        use = place.use
        ins = use.spec.out_features if use.is_table else use.spec.in_features
        for header, wanted in ((pair.a, (rank, ins)), (pair.b, (place.rows, rank))):
            if header.shape != wanted:
                raise other_shape(header, wanted)
        yield LowRank(use, place.first, pair.a, pair.b, rank, scale)

    def _of_experts(self, pair: _Pair) -> Iterator[LowRank]:
        module = pair.low.module
        targeted = [each for each in _PARAMETERS if each in self._settings.parameters_of(module)]
        found = [(name, uses) for name in targeted if (uses := self._modules.stack(module, name)) is not None]
        if not found:
            raise refused_tensor(pair.a, "belongs to no linear layer of this model")
        fitting = [each for each in found if self._swapped(pair, *each) is not None]
        if len(found) > pair.low.depth and len(fitting) > 1:
            fitting = [found[len(found) - 1 - pair.low.depth]]
        if len(fitting) != 1:
            name, uses = found[0]
            rank, _ = self._settings.of(module, name)
            raise other_shape(pair.a, (len(uses) * rank, uses[0].spec.in_features))
        name, uses = fitting[0]
        rank, scale = self._settings.of(module, name)
        check_rank(pair.name, rank, self._max_rank)
        swapped = bool(self._swapped(pair, name, uses))
        for use in uses:
            yield LowRank(use, 0, pair.a, pair.b, rank, scale, use.expert, len(uses), swapped)

    def _swapped(self, pair: _Pair, name: str, uses: list[LinearUse]) -> bool | None:
        """Return whether the tensors are those of transposed matrices; None: they do not fit."""
        rank, _ = self._settings.of(pair.low.module, name)
        stacked, spec = len(uses) * rank, uses[0].spec
        if (pair.a.shape, pair.b.shape) == ((stacked, spec.in_features), (spec.out_features, stacked)):
            return False
        if (pair.a.shape, pair.b.shape) == ((stacked, spec.out_features), (spec.in_features, stacked)):
            return True
        return None

    def _check_none_missing(self, parts: list[LowRank]) -> None:
        """Refuse an adapter without the tensors of a layer that its settings target: its file was cut."""
        settings = self._settings
        if settings.target_modules is None or str(settings.target_modules).lower() == "all-linear":
            return
        places = {(part.use.number, part.first_row) for part in parts}
        example = next(iter(parts)).a.name
        trained = next(low.module for low in (low_tensor(example),) if low is not None)
        prefix = trained[: len(trained) - len(bare(trained))]
        for module in self._modules.matrices():
            place = self._modules.place(module)
            if place is None or place.use.role in ("router", "shared_gate"):
                continue  # matrices or parameters, as the trainer's classes have them
            if (place.use.number, place.first) not in places and settings.targets(prefix + module):
                raise unreadable(
                    f"`{ADAPTER_WEIGHTS}` has no tensor of `{prefix}{module}`, which `{ADAPTER_CONFIG}` targets. "
                    "Fetch the folder again."
                )


def _pair(sides: dict[str, tuple[LowTensor, TensorHeader]]) -> _Pair:
    if len(sides) == 1:
        _, header = next(iter(sides.values()))
        other = "B" if "A" in sides else "A"
        raise unreadable(f"`{ADAPTER_WEIGHTS}` has `{header.name}` and no {other} beside it. Fetch the folder again.")
    (low, a), (_, b) = sides["A"], sides["B"]
    return _Pair(a.name, low, a, b)
