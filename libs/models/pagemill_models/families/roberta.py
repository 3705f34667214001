"""RoBERTa (arXiv 1907.11692) and XLM-RoBERTa (arXiv 1911.02116): BERT whose positions begin after that of padding."""

from __future__ import annotations

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import ClassifierSpec, DecoderSpec, DenseSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.parts import linear
from pagemill_models.families.bert import encoder


def read_config(config: ConfigValues) -> DecoderSpec:
    offset = config.integer("pad_token_id", default=1) + 1
    return encoder(config, "roberta", _classifier(config) if config.is_classifier else None, position_offset=offset)


def _classifier(config: ConfigValues) -> ClassifierSpec:
    size = config.size("hidden_size", default=768)
    dense = DenseSpec(linear=linear(size, ("classifier.dense", size), bias=True), activation="tanh")
    labels = DenseSpec(linear=linear(size, ("classifier.out_proj", config.num_labels), bias=True))
    return ClassifierSpec((dense, labels), "cls")


FAMILY = Family(read_config)
