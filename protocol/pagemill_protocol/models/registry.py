"""From the architecture that a model's files name to its family, imported when it is first asked for.

The one list of what is supported: engine, planner, loader, error messages and the reference page read it. Packages from
outside add families by entry points of the groups below, named as the files name the architecture.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pagemill_protocol.models.errors import UnsupportedModelArchitecture
from pagemill_protocol.rope_scaling import RopeError, UnsupportedRopeError
from pagemill_protocol.sources import UnreadableModelError

if TYPE_CHECKING:
    from pagemill_protocol.models.family import Family

GROUP = "pagemill.models"
"""Entry points named as in `architectures` of config.json, or as its `model_type`."""
GGUF_GROUP = "pagemill.models.gguf"
"""Entry points named as `general.architecture`."""


class Names(NamedTuple):
    """What files call a family."""

    architectures: tuple[str, ...]
    """In `architectures` of config.json; the first is the canonical one, the others are old spellings."""
    model_type: str
    """In config.json: found where it names no architecture."""
    gguf: tuple[str, ...] = ()
    """In `general.architecture`."""


BUILT_IN: dict[str, Names] = {
    "aquila": Names(("AquilaForCausalLM", "AquilaModel"), "aquila"),
    "baichuan": Names(("BaichuanForCausalLM", "BaiChuanForCausalLM"), "baichuan", ("baichuan",)),
    "bloom": Names(("BloomForCausalLM",), "bloom", ("bloom",)),
    "cohere": Names(("CohereForCausalLM",), "cohere", ("command-r",)),
    "falcon": Names(("FalconForCausalLM", "RWForCausalLM"), "falcon", ("falcon",)),
    "gemma": Names(("GemmaForCausalLM",), "gemma", ("gemma",)),
    "gemma2": Names(("Gemma2ForCausalLM",), "gemma2", ("gemma2",)),
    "gemma3": Names(("Gemma3ForCausalLM",), "gemma3_text", ("gemma3",)),
    "gpt2": Names(("GPT2LMHeadModel",), "gpt2", ("gpt2",)),
    "gpt_bigcode": Names(("GPTBigCodeForCausalLM",), "gpt_bigcode", ("starcoder",)),
    "gpt_neox": Names(("GPTNeoXForCausalLM",), "gpt_neox", ("gptneox",)),
    "gptj": Names(("GPTJForCausalLM",), "gptj"),
    "gpt_oss": Names(("GptOssForCausalLM",), "gpt_oss", ("gpt-oss",)),
    "granite": Names(("GraniteForCausalLM",), "granite", ("granite",)),
    "internlm": Names(("InternLMForCausalLM",), "internlm"),
    "internlm2": Names(("InternLM2ForCausalLM",), "internlm2", ("internlm2",)),
    "internlm3": Names(("InternLM3ForCausalLM",), "internlm3"),
    "llama": Names(("LlamaForCausalLM", "LLaMAForCausalLM"), "llama", ("llama",)),
    "mistral": Names(("MistralForCausalLM",), "mistral"),
    "mixtral": Names(("MixtralForCausalLM",), "mixtral"),
    "mpt": Names(("MptForCausalLM", "MPTForCausalLM"), "mpt", ("mpt",)),
    "nemotron": Names(("NemotronForCausalLM",), "nemotron", ("nemotron",)),
    "olmo2": Names(("Olmo2ForCausalLM",), "olmo2", ("olmo2",)),
    "olmoe": Names(("OlmoeForCausalLM",), "olmoe", ("olmoe",)),
    "opt": Names(("OPTForCausalLM",), "opt"),
    "phi": Names(("PhiForCausalLM",), "phi", ("phi2",)),
    "phi3": Names(("Phi3ForCausalLM",), "phi3", ("phi3",)),
    "qwen": Names(("QWenLMHeadModel",), "qwen", ("qwen",)),
    "qwen2": Names(("Qwen2ForCausalLM",), "qwen2", ("qwen2",)),
    "qwen2_moe": Names(("Qwen2MoeForCausalLM",), "qwen2_moe", ("qwen2moe",)),
    "qwen3": Names(("Qwen3ForCausalLM",), "qwen3", ("qwen3",)),
    "qwen3_moe": Names(("Qwen3MoeForCausalLM",), "qwen3_moe", ("qwen3moe",)),
    "smollm3": Names(("SmolLM3ForCausalLM",), "smollm3", ("smollm3",)),
    "stablelm": Names(("StableLmForCausalLM", "StableLMEpochForCausalLM"), "stablelm", ("stablelm",)),
    "starcoder2": Names(("Starcoder2ForCausalLM",), "starcoder2", ("starcoder2",)),
}
"""By module of this package."""


class Found(NamedTuple):
    architecture: str
    """Its canonical name."""
    family: Family


def find_family(names: Iterable[str], path: Path) -> Found:
    """The family of the first of `names` that is known: architectures, or a model type.

    Raises `UnsupportedModelArchitecture` with the list of what is known. `path`: of the model, for the message.
    """
    names = list(names)
    for name in names:
        for module, known in BUILT_IN.items():
            if name in (*known.architectures, known.model_type):
                return Found(known.architectures[0], _built_in(module))
    outside = _outside(GROUP)
    for name in names:
        if name in outside:
            return Found(name, _load(outside[name]))
    raise unsupported(names[0] if names else "", path)


def find_gguf_family(name: str, path: Path) -> Found:
    """As `find_family`, by `general.architecture`."""
    for module, known in BUILT_IN.items():
        if name in known.gguf:
            return Found(known.architectures[0], _built_in(module))
    outside = _outside(GGUF_GROUP)
    if name in outside:
        return Found(name, _load(outside[name]))
    raise unsupported(name, path)


def known_architectures() -> list[str]:
    """Canonical names, those of packages from outside too; imports no family."""
    return sorted({known.architectures[0] for known in BUILT_IN.values()} | _outside(GROUP).keys())


def unsupported(architecture: str, path: Path, feature: str = "") -> UnsupportedModelArchitecture:
    """The error for a model that no family here describes; names what it is and what would work."""
    return UnsupportedModelArchitecture(
        f"`{path}` has the architecture `{architecture}`{feature}, which is not supported. "
        f"Supported: {', '.join(known_architectures())}."
    )


@contextmanager
def rope_refusals(architecture: str, path: Path) -> Iterator[None]:
    """Report rope settings that cannot be used as errors of the model at `path`."""
    try:
        yield
    except UnsupportedRopeError as error:
        raise unsupported(architecture, path, f" with {error}") from None
    except RopeError as error:
        raise UnreadableModelError(f"`{path}`: {error}") from None


def _built_in(module: str) -> Family:
    family: Family = importlib.import_module(f"pagemill_protocol.models.{module}").FAMILY
    return family


def _outside(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _load(point: EntryPoint) -> Family:
    from pagemill_protocol.models.family import Family

    package = point.dist.name if point.dist is not None else point.module
    try:
        found = point.load()
    except Exception as error:
        raise UnsupportedModelArchitecture(
            f"The architecture `{point.name}` comes from the package `{package}`, whose `{point.value}` cannot be "
            f"imported ({type(error).__name__}: {error}). Repair or remove that package."
        ) from error
    if not isinstance(found, Family):
        raise UnsupportedModelArchitecture(
            f"The architecture `{point.name}` comes from the package `{package}`, whose `{point.value}` is a "
            f"{type(found).__name__}, not a `Family`. Repair or remove that package."
        )
    return found
