"""The supported model families, with the names that files use for them, and the errors for unsupported ones.

External packages add families by entry points of the groups below, named as the files name the architecture; `registry`
finds and imports them. Planner, loader, error messages and the reference page read this list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import NamedTuple

from pagemill_models.declaration.errors import UnsupportedModelArchitecture
from pagemill_models.declaration.rope_scaling import RopeError, UnsupportedRopeError
from pagemill_protocol.source_errors import UnreadableModelError

GROUP = "pagemill.models"
"""Group of entry points named as in `architectures` of config.json, or as its `model_type`."""
GGUF_GROUP = "pagemill.models.gguf"
"""Group of entry points named as `general.architecture`."""


class Names(NamedTuple):
    """The names that files use for a family."""

    architectures: tuple[str, ...]
    """Names in `architectures` of config.json; the first is the canonical one, the others are old spellings."""
    model_type: str
    """Value of `model_type` in config.json, used where it names no architecture."""
    gguf: tuple[str, ...] = ()
    """Values of `general.architecture`."""


BUILT_IN: dict[str, Names] = {
    "aquila": Names(("AquilaForCausalLM", "AquilaModel"), "aquila"),
    "baichuan": Names(("BaichuanForCausalLM", "BaiChuanForCausalLM"), "baichuan", ("baichuan",)),
    "bamba": Names(("BambaForCausalLM",), "bamba"),
    "bert": Names(("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"), "bert"),
    "bloom": Names(("BloomForCausalLM",), "bloom", ("bloom",)),
    "cohere": Names(("CohereForCausalLM",), "cohere", ("command-r",)),
    "cohere2": Names(("Cohere2ForCausalLM",), "cohere2", ("cohere2",)),
    "deepseek_v2": Names(("DeepseekV2ForCausalLM",), "deepseek_v2"),
    "deepseek_v3": Names(("DeepseekV3ForCausalLM",), "deepseek_v3", ("deepseek2",)),
    "ernie4_5": Names(("Ernie4_5ForCausalLM",), "ernie4_5", ("ernie4_5",)),
    "ernie4_5_moe": Names(("Ernie4_5_MoeForCausalLM",), "ernie4_5_moe", ("ernie4_5-moe",)),
    "exaone4": Names(("Exaone4ForCausalLM",), "exaone4", ("exaone4",)),
    "falcon": Names(("FalconForCausalLM", "RWForCausalLM"), "falcon", ("falcon",)),
    "falcon_h1": Names(("FalconH1ForCausalLM",), "falcon_h1", ("falcon-h1",)),
    "gemma": Names(("GemmaForCausalLM",), "gemma", ("gemma",)),
    "gemma2": Names(("Gemma2ForCausalLM",), "gemma2", ("gemma2",)),
    "gemma3": Names(("Gemma3ForCausalLM",), "gemma3_text", ("gemma3",)),
    "gemma4": Names(("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"), "gemma4_text", ("gemma4",)),
    "glm4": Names(("Glm4ForCausalLM",), "glm4", ("glm4",)),
    "glm4_moe": Names(("Glm4MoeForCausalLM",), "glm4_moe", ("glm4moe",)),
    "glm4_moe_lite": Names(("Glm4MoeLiteForCausalLM",), "glm4_moe_lite"),
    "gpt2": Names(("GPT2LMHeadModel",), "gpt2", ("gpt2",)),
    "gpt_bigcode": Names(("GPTBigCodeForCausalLM",), "gpt_bigcode", ("starcoder",)),
    "gpt_neox": Names(("GPTNeoXForCausalLM",), "gpt_neox", ("gptneox",)),
    "gptj": Names(("GPTJForCausalLM",), "gptj", ("gptj",)),
    "gpt_oss": Names(("GptOssForCausalLM",), "gpt_oss", ("gpt-oss",)),
    "granite": Names(("GraniteForCausalLM",), "granite", ("granite",)),
    "granitemoehybrid": Names(("GraniteMoeHybridForCausalLM",), "granitemoehybrid", ("granitehybrid",)),
    "hunyuan_v1_dense": Names(("HunYuanDenseV1ForCausalLM",), "hunyuan_v1_dense", ("hunyuan-dense",)),
    "hunyuan_v1_moe": Names(("HunYuanMoEV1ForCausalLM",), "hunyuan_v1_moe", ("hunyuan-moe",)),
    "internlm": Names(("InternLMForCausalLM",), "internlm"),
    "internlm2": Names(("InternLM2ForCausalLM",), "internlm2", ("internlm2",)),
    "internlm3": Names(("InternLM3ForCausalLM",), "internlm3"),
    "kimi_linear": Names(("KimiLinearForCausalLM",), "kimi_linear", ("kimi-linear",)),
    "lfm2": Names(("Lfm2ForCausalLM",), "lfm2", ("lfm2",)),
    "lfm2_moe": Names(("Lfm2MoeForCausalLM",), "lfm2_moe", ("lfm2moe",)),
    "lfm3": Names(("Lfm3ForCausalLM",), "lfm3"),
    "llama": Names(("LlamaForCausalLM", "LLaMAForCausalLM"), "llama", ("llama",)),
    "minimax_m2": Names(("MiniMaxM2ForCausalLM",), "minimax_m2", ("minimax-m2",)),
    "ministral3": Names(("Ministral3ForCausalLM",), "ministral3", ("mistral3",)),
    "mistral": Names(("MistralForCausalLM",), "mistral"),
    "mistral4": Names(("Mistral4ForCausalLM",), "mistral4", ("mistral4",)),
    "mixtral": Names(("MixtralForCausalLM",), "mixtral"),
    "modernbert": Names(
        ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"), "modernbert"
    ),
    "mpt": Names(("MptForCausalLM", "MPTForCausalLM"), "mpt", ("mpt",)),
    "nemotron": Names(("NemotronForCausalLM",), "nemotron", ("nemotron",)),
    "nemotron_h": Names(("NemotronHForCausalLM",), "nemotron_h", ("nemotron_h", "nemotron_h_moe")),
    "olmo2": Names(("Olmo2ForCausalLM",), "olmo2", ("olmo2",)),
    "olmo3": Names(("Olmo3ForCausalLM",), "olmo3"),
    "olmo_hybrid": Names(("OlmoHybridForCausalLM",), "olmo_hybrid"),
    "olmoe": Names(("OlmoeForCausalLM",), "olmoe", ("olmoe",)),
    "opt": Names(("OPTForCausalLM",), "opt"),
    "phi": Names(("PhiForCausalLM",), "phi", ("phi2",)),
    "phi3": Names(("Phi3ForCausalLM",), "phi3", ("phi3",)),
    "qwen": Names(("QWenLMHeadModel",), "qwen", ("qwen",)),
    "qwen2": Names(("Qwen2ForCausalLM",), "qwen2", ("qwen2",)),
    "qwen2_moe": Names(("Qwen2MoeForCausalLM",), "qwen2_moe", ("qwen2moe",)),
    "qwen3": Names(("Qwen3ForCausalLM",), "qwen3", ("qwen3",)),
    "qwen3_moe": Names(("Qwen3MoeForCausalLM",), "qwen3_moe", ("qwen3moe",)),
    "qwen3_5": Names(("Qwen3_5ForCausalLM",), "qwen3_5_text", ("qwen35",)),
    "qwen3_5_moe": Names(("Qwen3_5MoeForCausalLM",), "qwen3_5_moe_text", ("qwen35moe",)),
    "qwen3_next": Names(("Qwen3NextForCausalLM",), "qwen3_next", ("qwen3next",)),
    "roberta": Names(("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"), "roberta"),
    "seed_oss": Names(("SeedOssForCausalLM",), "seed_oss", ("seed_oss",)),
    "smollm3": Names(("SmolLM3ForCausalLM",), "smollm3", ("smollm3",)),
    "stablelm": Names(("StableLmForCausalLM", "StableLMEpochForCausalLM"), "stablelm", ("stablelm",)),
    "starcoder2": Names(("Starcoder2ForCausalLM",), "starcoder2", ("starcoder2",)),
    "xlm_roberta": Names(
        ("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"), "xlm-roberta"
    ),
}
"""Names by module of this package."""


class Multimodal(NamedTuple):
    """What a class says where its `config.json` does not."""

    text_type: str
    """`model_type` of its text part."""
    tied: bool
    """Whether the embedding is the head."""


MULTIMODAL: dict[str, Multimodal] = {
    "Gemma3ForConditionalGeneration": Multimodal("gemma3_text", True),
    "Gemma4ForConditionalGeneration": Multimodal("gemma4_text", True),
    "Gemma4UnifiedForConditionalGeneration": Multimodal("gemma4_unified_text", True),
    "InternVLForConditionalGeneration": Multimodal("qwen2", True),
    "Mistral3ForConditionalGeneration": Multimodal("mistral", True),
    "Qwen2VLForConditionalGeneration": Multimodal("qwen2_vl_text", False),
    "Qwen2_5_VLForConditionalGeneration": Multimodal("qwen2_5_vl_text", False),
    "Qwen3_5ForConditionalGeneration": Multimodal("qwen3_5_text", False),
    "Qwen3_5MoeForConditionalGeneration": Multimodal("qwen3_5_moe_text", False),
    "Qwen3VLForConditionalGeneration": Multimodal("qwen3_vl_text", False),
    "Qwen3VLMoeForConditionalGeneration": Multimodal("qwen3_vl_moe_text", False),
}
"""Models of which only the text part is read."""
TEXT_TYPES: dict[str, str] = {
    "gemma4_unified_text": "gemma4",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
}
"""The module of each text part that is no model of its own, by its `model_type`."""
OTHER_CLASSES: dict[str, str] = {
    "InternVLChatModel": "Fetch the same model with the class `InternVLForConditionalGeneration` (its name ends with "
    "`-HF`), or convert it with transformers' convert_internvl_weights_to_hf.py.",
    **dict.fromkeys(
        ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        "Its layers compute several streams of hidden states (AltUp), which is not supported; use a model with the "
        "class `Gemma3ForConditionalGeneration` or `Gemma4ForConditionalGeneration`.",
    ),
    "MllamaForConditionalGeneration": "Its layers of cross-attention read images; use a model with the class "
    "`LlamaForCausalLM`, such as Llama 3.1, of which it is made.",
}
"""What to use in place of models that are known and not supported."""

RECURRENT = "layers with a recurrent state in addition to the KV cache"
"""Feature of unsupported hybrid models: docs/adr/0053."""
RECURRENT_GGUF = ("jamba", "plamo2")
"""Their values of `general.architecture`."""


def known_architectures() -> list[str]:
    """Return all canonical names, including those of external packages, without importing a family."""
    return sorted({known.architectures[0] for known in BUILT_IN.values()} | entry_points_of(GROUP).keys())


def unsupported(architecture: str, path: Path, feature: str = "") -> UnsupportedModelArchitecture:
    """Return the error for a model without a family; it names the architecture and the supported ones."""
    return UnsupportedModelArchitecture(
        f"`{path}` has the architecture `{architecture}`{feature}, which is not supported. "
        f"Supported: {', '.join(known_architectures())}."
    )


@contextmanager
def rope_errors(architecture: str, path: Path) -> Iterator[None]:
    """Convert errors of rope settings to errors of the model at `path`."""
    try:
        yield
    except UnsupportedRopeError as error:
        raise unsupported(architecture, path, f" with {error}") from None
    except RopeError as error:
        raise UnreadableModelError(f"`{path}`: {error}") from None


def entry_points_of(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of installed packages by name."""
    return {point.name: point for point in entry_points(group=group)}
