"""`LLM.embed` and `LLM.score` have vLLM's names, equal transformers, and refuse unsupported arguments by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from encoder_models import CLASSIFIERS, ENCODERS, write_encoder, write_modules, write_wordpiece
from transformers import AutoTokenizer

from pagemill import LLM, PoolingParams
from pagemill_protocol.errors import PagemillError

TEXTS = ["Paris is the capital of France", "cats sleeping", "the capital of Germany is Berlin"]


def test_embeddings_equal_transformers_and_scores_are_their_cosines(tmp_path: Path) -> None:
    model = write_encoder(*ENCODERS["bert"], tmp_path)
    write_modules(tmp_path, "cls")
    write_wordpiece(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0] for text in TEXTS]
    expected = torch.nn.functional.normalize(torch.stack(states), dim=1)
    with LLM(tmp_path, dtype="float32", num_threads=1) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
        ids = llm.embed(outputs[1].prompt_token_ids, use_tqdm=False)
        scores = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
        long = llm.embed("cats " * 200, truncate_prompt_tokens=-1, use_tqdm=False)
        with pytest.raises(PagemillError, match=r"prompts\[1\]"):
            llm.embed(["cats", "cats " * 200])
        with pytest.raises(PagemillError, match="`dimensions` 8 is not supported"):
            llm.embed("cats", pooling_params=PoolingParams(dimensions=8))
        with pytest.raises(PagemillError, match="computes embeddings and generates no text"):
            llm.generate("cats", use_tqdm=False)
        with pytest.raises(PagemillError, match="data_1 has 2 texts and data_2 3"):
            llm.score(TEXTS[:2], TEXTS)
    found = torch.tensor([output.outputs.embedding for output in outputs])
    torch.testing.assert_close(found, expected, atol=3e-6, rtol=0)
    assert [output.outputs.hidden_size for output in outputs] == [64] * 3
    assert outputs[0].prompt_token_ids == tokenizer(TEXTS[0])["input_ids"]
    assert ids[0].outputs == outputs[1].outputs
    assert len(long[0].prompt_token_ids) == 130
    cosines = torch.tensor([score.outputs.score for score in scores])
    torch.testing.assert_close(cosines, expected[1:] @ expected[0], atol=3e-6, rtol=0)


def test_a_cross_encoder_scores_pairs_and_truncates_the_longer_text(tmp_path: Path) -> None:
    model = write_encoder(*CLASSIFIERS["bert"], tmp_path)
    write_wordpiece(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[1], "cats " * 300), ("the " * 300, "cats " * 300), ("the " * 300, TEXTS[1])]
    firsts, seconds = [list(side) for side in zip(*pairs, strict=True)]
    with torch.no_grad():
        encoded = [tokenizer(*pair, truncation=True, max_length=130, return_tensors="pt") for pair in pairs]
        expected = torch.cat([model(**each).logits[0] for each in encoded]).sigmoid()
    with LLM(tmp_path, dtype="float32", num_threads=1) as llm:
        scores = llm.score(firsts, seconds, truncate_prompt_tokens=-1, use_tqdm=False)
        with pytest.raises(PagemillError, match="scores pairs of texts"):
            llm.embed("cats")
    assert [score.prompt_token_ids for score in scores] == [each["input_ids"][0].tolist() for each in encoded]
    found = torch.tensor([score.outputs.score for score in scores])
    torch.testing.assert_close(found, expected, atol=3e-6, rtol=0)
