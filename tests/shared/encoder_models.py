"""Tiny random encoders and pooled decoders in the formats of transformers and sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

VOCAB_SIZE = 640
_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 130,
    "initializer_range": 0.3,
}
_ROBERTA = {**_SMALL, "type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 132}
_MODERN = {
    **_SMALL,
    "local_attention": 16,
    "global_attn_every_n_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_EMBEDDING_GEMMA = {
    **_SMALL,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 15,
    "use_bidirectional_attention": True,
}
_DECODER = {**_SMALL, "num_key_value_heads": 2, "head_dim": 16}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", _SMALL),
    "roberta": ("RobertaModel", _ROBERTA),
    "xlm_roberta": ("XLMRobertaModel", _ROBERTA),
    "modernbert": ("ModernBertModel", _MODERN),
}
"""The class and configuration of each."""
BIDIRECTIONAL: dict[str, tuple[str, dict[str, Any]]] = {"embedding gemma": ("Gemma3TextModel", _EMBEDDING_GEMMA)}
"""Encoders whose family also generates text."""
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", {**_SMALL, "num_labels": 1}),
    "xlm_roberta": ("XLMRobertaForSequenceClassification", {**_ROBERTA, "num_labels": 1}),
    "modernbert": ("ModernBertForSequenceClassification", {**_MODERN, "num_labels": 1, "classifier_pooling": "mean"}),
    "qwen3": ("Qwen3ForSequenceClassification", {**_DECODER, "num_labels": 1, "pad_token_id": 0}),
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Model", _DECODER),
    "llama": ("LlamaForCausalLM", _DECODER),
    "mistral": ("MistralModel", _DECODER),
}


def write_encoder(name: str, config: dict[str, Any], folder: Path) -> Any:
    """Save a model with random weights, including norms, to `folder`; return it."""
    torch.manual_seed(7)
    kind: Any = getattr(transformers, name)
    model = kind(kind.config_class(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def write_modules(
    folder: Path, method: str = "mean", *, normalize: bool = True, dense: tuple[str, ...] = (), **more: Any
) -> list[torch.nn.Linear]:
    """Write the files that tell sentence-transformers how to pool; `more` is added to
    `config_sentence_transformers.json`. `dense`: the activations of dense layers, of which each halves the vector.
    Returns these layers.
    """
    names = ["Transformer", "Pooling", *(["Dense"] * len(dense)), *(["Normalize"] * normalize)]
    modules = [
        {
            "idx": index, "name": str(index), "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(names)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {
        "cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken", "max": "max_tokens",
        "mean_sqrt_len": "mean_sqrt_len_tokens", "weighted_mean": "weightedmean_tokens",
    }  # fmt: skip
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    pooling: dict[str, Any] = {"word_embedding_dimension": size}
    pooling |= {f"pooling_mode_{mode}": mode == modes[method] for mode in modes.values()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if more:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(more))
    return [_write_dense(folder / f"{2 + at}_Dense", size >> at, name) for at, name in enumerate(dense)]


def _write_dense(folder: Path, size: int, activation: str) -> torch.nn.Linear:
    layer = torch.nn.Linear(size, size // 2)
    folder.mkdir()
    values = {"in_features": size, "out_features": size // 2, "bias": True, "activation_function": activation}
    (folder / "config.json").write_text(json.dumps(values))
    save_file({f"linear.{name}": value.data for name, value in layer.named_parameters()}, folder / "model.safetensors")
    return layer.requires_grad_(False)


def write_wordpiece(folder: Path) -> None:
    """Write a tokenizer like BERT's, of letters and a few words."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["paris", "berlin", "is", "the", "capital", "of", "france", "germany", "cats", "sleep", "##ing", "##s"]
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{each}" for each in letters), *words]
    backend = Tokenizer(
        models.WordPiece(vocab={entry: index for index, entry in enumerate(entries)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_special_tokens(entries[:5])
    _save(backend, folder, {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]"}, "Bert")


def write_unigram(folder: Path) -> None:
    """Write a tokenizer like XLM-RoBERTa's, of letters and a few words."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["▁", "▁paris", "▁is", "▁the", "▁capital", "▁of", "▁france", "▁cat", "s"]
    entries = ["<s>", "<pad>", "</s>", "<unk>", *words, *(each for each in letters if each != "s")]
    backend = Tokenizer(models.Unigram([(entry, -float(index)) for index, entry in enumerate(entries)], unk_id=3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    backend.add_special_tokens(entries[:4])
    _save(backend, folder, {"cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}, "PreTrained")


def _save(backend: Any, folder: Path, tokens: dict[str, str], kind: str) -> None:
    backend.save(str(folder / "tokenizer.json"))
    named = {f"{name}_token": token for name, token in tokens.items()}
    settings = {**named, "tokenizer_class": f"{kind}TokenizerFast", "model_max_length": 130}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
