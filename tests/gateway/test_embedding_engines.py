"""Embeddings, scores and ranks through a gateway and real engines, with the openai client, equal transformers."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from encoder_models import CLASSIFIERS, ENCODERS, write_encoder, write_modules, write_unigram, write_wordpiece
from real_cluster import Cluster, endpoint_of, start_cluster
from transformers import AutoTokenizer
from waiting import wait_until

from pagemill_servers.auth import hash_key

pytestmark = pytest.mark.slow

__all__ = ["start_cluster"]
TEXTS = ["Paris is the capital of France", "cats sleeping", "the capital of Germany is Berlin", "zebras"]
TOLERANCE = 3e-6
Cosine = torch.nn.functional.cosine_similarity


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("bert")
    model = write_encoder(*ENCODERS["bert"], folder)
    write_modules(folder, "mean", prompts={"query": "the ", "document": ""})
    write_wordpiece(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [16]}))
    return folder, model


@pytest.fixture(scope="module")
def cluster(bert: tuple[Path, Any], start_cluster: Callable[..., Cluster]) -> Cluster:
    return start_cluster(2, model=str(bert[0]), max_model_len=None, kv_cache_memory_bytes=None, dtype="float32")


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory, start_cluster: Callable[..., Cluster]) -> tuple[Cluster, Any, Any]:
    folder = tmp_path_factory.mktemp("ranker")
    model = write_encoder(*CLASSIFIERS["bert"], folder)
    write_wordpiece(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return (
        start_cluster(1, model=str(folder), max_model_len=None, kv_cache_memory_bytes=None, dtype="float32"),
        model,
        tokenizer,
    )


def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def vectors(model: Any, folder: Path, texts: list[str]) -> torch.Tensor:
    """Return the vectors as sentence-transformers computes them: the normalized mean of the tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(states), dim=1)


def test_the_openai_client_gets_the_vectors_of_transformers(cluster: Cluster, bert: tuple[Path, Any]) -> None:
    expected = vectors(bert[1], bert[0], TEXTS)
    with cluster.client() as client:
        as_base64 = client.embeddings.create(model="smol", input=TEXTS)  # the client's default format
        as_floats = client.embeddings.create(model="smol", input=TEXTS, encoding_format="float")
        cut = client.embeddings.create(model="smol", input=TEXTS[0], dimensions=16)
    for found in (as_base64, as_floats):
        assert [each.index for each in found.data] == [0, 1, 2, 3]
        ours = torch.tensor([each.embedding for each in found.data])
        torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)
    assert as_floats.model == "smol"
    assert as_floats.usage.prompt_tokens == as_floats.usage.total_tokens > len(TEXTS)
    shorter = torch.nn.functional.normalize(expected[0, :16], dim=0)
    torch.testing.assert_close(torch.tensor(cut.data[0].embedding), shorter, atol=TOLERANCE, rtol=0)
    with openai.OpenAI(base_url=endpoint_of(cluster.engines[0]).data_url + "/v1", api_key="none") as client:
        direct = client.embeddings.create(model="smol", input=TEXTS)
    assert [each.embedding for each in direct.data] == [each.embedding for each in as_base64.data]


def test_token_ids_and_the_models_prompts_are_accepted(cluster: Cluster, bert: tuple[Path, Any]) -> None:
    ids = AutoTokenizer.from_pretrained(bert[0])(TEXTS[:2])["input_ids"]
    expected = vectors(bert[1], bert[0], [TEXTS[0], TEXTS[1], "the " + TEXTS[0]])
    for body, rows in (
        ({"input": ids}, [0, 1]),
        ({"input": ids[1]}, [1]),
        ({"input": TEXTS[0], "prompt_name": "query"}, [2]),
    ):
        status, answer = post(cluster.url, "/v1/embeddings", {"model": "smol", "encoding_format": "base64", **body})
        assert status == 200, answer
        raw = [bytearray(base64.b64decode(each["embedding"])) for each in answer["data"]]
        found = torch.stack([torch.frombuffer(each, dtype=torch.float32) for each in raw])
        torch.testing.assert_close(found, expected[rows], atol=TOLERANCE, rtol=0)


def test_a_long_text_is_refused_or_truncated(cluster: Cluster, bert: tuple[Path, Any]) -> None:
    long = "cats sleep " * 100
    status, answer = post(cluster.url, "/v1/embeddings", {"model": "smol", "input": ["cats", long]})
    assert (status, answer["error"]["param"]) == (400, "input[1]")
    assert answer["error"]["code"] == "context_length_exceeded"
    ids = AutoTokenizer.from_pretrained(bert[0])(long, truncation=True, max_length=130)["input_ids"]
    cut = post(cluster.url, "/v1/embeddings", {"model": "smol", "input": long, "truncate_prompt_tokens": -1})[1]
    given = post(cluster.url, "/v1/embeddings", {"model": "smol", "input": ids})[1]
    assert cut["usage"]["prompt_tokens"] == 130
    assert cut["data"] == given["data"]


def test_scores_and_ranks_of_an_embedding_model_are_cosines(cluster: Cluster, bert: tuple[Path, Any]) -> None:
    found = vectors(bert[1], bert[0], TEXTS)
    body = {"model": "smol", "text_1": TEXTS[0], "text_2": TEXTS[1:]}
    status, answer = post(cluster.url, "/v1/score", body)
    assert status == 200, answer
    scores = torch.tensor([each["score"] for each in answer["data"]])
    torch.testing.assert_close(scores, Cosine(found[:1], found[1:]), atol=TOLERANCE, rtol=0)
    status, answer = post(cluster.url, "/score", {**body, "text_1": TEXTS[:3]})
    scores = torch.tensor([each["score"] for each in answer["data"]])
    torch.testing.assert_close(scores, Cosine(found[:3], found[1:]), atol=TOLERANCE, rtol=0)
    # The query follows the model's own prompt for queries, the documents follow the one for documents.
    query = vectors(bert[1], bert[0], ["the " + TEXTS[0]])
    expected = Cosine(query, found[1:])
    status, answer = post(cluster.url, "/v1/rerank", {"model": "smol", "query": TEXTS[0], "documents": TEXTS[1:]})
    assert status == 200, answer
    assert [each["index"] for each in answer["results"]] == expected.argsort(descending=True).tolist()
    ranked = torch.tensor([each["relevance_score"] for each in answer["results"]])
    torch.testing.assert_close(ranked, expected.sort(descending=True).values, atol=TOLERANCE, rtol=0)


def test_a_cross_encoder_reads_query_and_document_together(ranker: tuple[Cluster, Any, Any]) -> None:
    cluster, model, tokenizer = ranker
    with torch.no_grad():
        logits = [model(**tokenizer(TEXTS[0], each, return_tensors="pt")).logits[0] for each in TEXTS[1:]]
    expected = torch.cat(logits).sigmoid()
    body = {"model": "smol", "query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        status, answer = post(cluster.url, path, {**body, "top_n": 2})
        assert status == 200, answer
        best = expected.argsort(descending=True)[:2].tolist()
        assert [each["index"] for each in answer["results"]] == best
        assert [each["document"] for each in answer["results"]] == [{"text": TEXTS[1:][index]} for index in best]
        ranked = torch.tensor([each["relevance_score"] for each in answer["results"]])
        torch.testing.assert_close(ranked, expected[best], atol=TOLERANCE, rtol=0)
    bare = post(cluster.url, "/v1/rerank", {**body, "return_documents": False})[1]
    assert all("document" not in each for each in bare["results"])
    for text_1, text_2 in ((TEXTS[0], TEXTS[1:]), ([TEXTS[0]] * 3, TEXTS[1:]), (TEXTS[0], TEXTS[1])):
        answer = post(cluster.url, "/v1/score", {"model": "smol", "text_1": text_1, "text_2": text_2})[1]
        scores = torch.tensor([each["score"] for each in answer["data"]])
        torch.testing.assert_close(scores, expected[: len(scores)], atol=TOLERANCE, rtol=0)


def test_unigram_pairs_are_joined_like_xlm_roberta_joins_them(
    tmp_path: Path, start_cluster: Callable[..., Cluster]
) -> None:
    model = write_encoder(*CLASSIFIERS["xlm_roberta"], tmp_path)
    write_unigram(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        encoded = [tokenizer("paris", each, return_tensors="pt")["input_ids"] for each in TEXTS]
        expected = torch.cat([model(input_ids=ids).logits[0] for ids in encoded]).sigmoid()
    cluster = start_cluster(1, model=str(tmp_path), max_model_len=None, kv_cache_memory_bytes=None, dtype="float32")
    answer = post(cluster.url, "/v1/score", {"model": "smol", "text_1": "paris", "text_2": TEXTS})[1]
    scores = torch.tensor([each["score"] for each in answer["data"]])
    torch.testing.assert_close(scores, expected, atol=TOLERANCE, rtol=0)


def test_tasks_that_a_model_does_not_support_are_refused_by_gateway_and_engine(
    cluster: Cluster, ranker: tuple[Cluster, Any, Any]
) -> None:
    chat = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
    for url in (cluster.url, endpoint_of(cluster.engines[0]).data_url):
        for path, body, message in (
            ("/v1/chat/completions", chat, "computes embeddings and generates no text. Send texts to /v1/embeddings"),
            ("/v1/completions", {"model": "smol", "prompt": "hi"}, "computes embeddings and generates no text"),
            ("/v1/embeddings", {"model": "smol", "input": "hi", "dimensions": 7}, "must be one of 16 for this model"),
            ("/v1/embeddings", {"model": "smol", "input": "hi", "prompt_name": "x"}, 'no prompt "x"'),
            ("/v1/embeddings", {"model": "smol", "input": []}, "`input` is empty"),
            ("/v1/embeddings", {"model": "smol", "input": ["a", ""]}, "The prompt is empty"),
            ("/v1/embeddings", {"model": "smol", "input": [[1, 10**6]]}, "token id 1000000"),
            ("/v1/score", {"model": "smol", "text_1": ["a", "b"], "text_2": "c"}, "`text_1` has 2 texts"),
            ("/v1/rerank", {"model": "smol", "query": "a", "documents": [1]}, "A document must be a string"),
        ):
            status, answer = post(url, path, body)
            assert (status, message in answer["error"]["message"]) == (400, True), answer
        assert post(url, "/api/show", {"model": "smol"})[1]["capabilities"] == ["embedding"]
    status, answer = post(ranker[0].url, "/v1/embeddings", {"model": "smol", "input": "hi"})
    assert (status, "scores pairs of texts" in answer["error"]["message"]) == (400, True)


def test_the_limits_of_a_key_apply_to_concurrent_embeddings(
    cluster: Cluster, start_cluster: Callable[..., Cluster]
) -> None:
    key, limit = "sk-embeds", 300
    keys = (f"{hash_key(key)} tokens_per_minute={limit}",)
    limited = start_cluster(cluster.engines, keys)
    with openai.OpenAI(base_url=limited.url + "/v1", api_key=key, max_retries=0) as client:
        each = client.embeddings.create(model="smol", input=TEXTS).usage.total_tokens

        def ask(_: int) -> int:
            try:
                return client.embeddings.create(model="smol", input=TEXTS).usage.total_tokens
            except openai.RateLimitError:
                return 0

        with ThreadPoolExecutor(8) as threads:
            served = each + sum(threads.map(ask, range(40)))
        # A running request reserves its maximum, so all requests of the burst may be refused meanwhile.
        served += ask(0)
    assert limit - each < served <= limit


def test_a_batch_of_embeddings_equals_single_requests(cluster: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    url = "/v1/embeddings"
    bodies = [{"model": "smol", "input": text} for text in TEXTS]
    lines = [{"custom_id": str(number), "url": url, "body": body} for number, body in enumerate(bodies)]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="1h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    output_id = client.batches.retrieve(batch.id).output_file_id
    assert output_id is not None
    results = {each["custom_id"]: each for each in map(json.loads, client.files.content(output_id).text.splitlines())}
    for number, body in enumerate(bodies):
        alone = post(cluster.url, url, body)[1]["data"][0]["embedding"]
        assert results[str(number)]["response"]["body"]["data"][0]["embedding"] == pytest.approx(alone, abs=TOLERANCE)


def test_another_engine_answers_when_one_is_killed(cluster: Cluster) -> None:
    """This test must be the last one that uses these engines."""
    body = {"model": "smol", "input": TEXTS * 8}
    before = post(cluster.url, "/v1/embeddings", body)[1]["data"]
    cluster.engines[1].kill()
    for _ in range(3):
        status, answer = post(cluster.url, "/v1/embeddings", body)
        assert status == 200, answer
        assert answer["data"] == before
