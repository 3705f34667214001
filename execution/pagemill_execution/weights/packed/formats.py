"""The packed formats by the method in `quantization_config`: the engine's own, and those of installed packages.

A package registers a format as an entry point of group `pagemill.weight_formats`: its name is the method, its object
a module with the functions of `Format`. It is loaded for a model that needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from pagemill_execution.weights.codes import CodeKind
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.packed import awq, bitsandbytes, compressed_tensors, fp8, gptq
from pagemill_execution.weights.packed.matrix import PackedMatrix, Settings, Stored
from pagemill_models.declaration.quantization_settings import GROUP


@runtime_checkable
class Format(Protocol):
    """The interface of the format modules."""

    def matrices(self, settings: Settings, stored: Stored) -> dict[str, PackedMatrix]:
        """Return the packed matrices by weight name. Raises `LoadError`."""
        ...

    def details(self, settings: Settings) -> list[str]:
        """Return a description of the settings, in words."""
        ...

    def is_packed(self, settings: Settings, names: Collection[str], base: str) -> bool:
        """Whether `base`.weight is packed, judged by the names of the stored tensors alone."""
        ...

    def kind(self, settings: Settings, names: Collection[str], base: str, shape: tuple[int, int]) -> CodeKind | None:
        """Return the form of a packed matrix in memory, as `PackedMatrix.kind`. `shape`: [out, in]."""
        ...


BUILT_IN: Mapping[str, Format] = {
    "awq": awq,
    "gptq": gptq,
    "fp8": fp8,
    "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
}
"""To add a format, add a module and an entry here, and its method to `quantization_settings.BUILT_IN`."""


def format_of(settings: Settings) -> Format | None:
    """Return the format of a folder's matrices, or None. Raises `LoadError` for one of a package that is unusable."""
    method = str(settings.get("quant_method"))
    if method in BUILT_IN:
        return BUILT_IN[method]
    for entry in entry_points(group=GROUP, name=method):
        try:
            found = entry.load()
        except Exception as error:
            raise _unusable(method, entry.value, f"{type(error).__name__}: {error}") from error
        if not isinstance(found, Format):
            raise _unusable(method, entry.value, "it has not the functions of a Format")
        return found
    return None


def _unusable(method: str, value: str, why: str) -> LoadError:
    message = f"The weight format `{method}` is registered as {value}, which cannot be used: {why}. Repair the package."
    return LoadError("UnsupportedQuantization", message)


def describe_format(settings: Settings) -> str:
    """Return a description of a folder's quantization by its settings."""
    method = str(settings.get("quant_method"))
    found = format_of(settings)
    details = [] if found is None else found.details(settings)
    return f"{method} ({', '.join(details)})" if details else method
