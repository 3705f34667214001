"""Detection of models that pool, and the declaration of a decoder without its head. `pooling_files` reads how they
pool; this module reads no file contents, so that declarations need no parser."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pagemill_models.declaration.declaration import ClassifierSpec, DecoderSpec, DenseSpec, LinearSpec, MatrixSpec

MODULES_FILE = "modules.json"
"""The list of modules of sentence-transformers, in the order of execution."""
CLASSIFIER = "ForSequenceClassification"


def pools(architectures: list[str], folder: Path) -> bool:
    """Whether the folder's model returns vectors or scores of texts, although its family may generate."""
    return any(name.endswith(CLASSIFIER) for name in architectures) or (folder / MODULES_FILE).is_file()


def without_head(decoder: DecoderSpec, num_labels: int | None) -> DecoderSpec:
    """Return a decoder that is pooled. `num_labels`: labels of its classifier, if it has one."""
    classifier = None
    if num_labels is not None:
        labels = LinearSpec(decoder.hidden_size, (MatrixSpec(name="score", rows=num_labels),))
        classifier = ClassifierSpec((DenseSpec(linear=labels),), "last")
    head = () if decoder.head is None else (f"{decoder.head.name}.weight", f"{decoder.head.name}.bias")
    return msgspec.structs.replace(
        decoder,
        head=None,
        classifier=classifier,
        ignored=(*decoder.ignored, *head),
        optional_prefix=decoder.optional_prefix or decoder.embedding.name.partition(".")[0] + ".",
    )
