"""Gateways hash prompts like engines, and hash only the new part of a conversation that grows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from pagemill_api.dialects.chat_completions.chat import ChatBody
from pagemill_api.dialects.chat_completions.completions import CompletionsBody
from pagemill_api.openai.schemas import ChatCompletionRequest, CompletionRequest
from pagemill_gateway.relay.preparation import prompt_keys, session_key
from pagemill_protocol import hashes
from pagemill_routing.brain.interface import HashScheme
from pagemill_routing.prompt_hashes import PromptHashes

SCHEME = HashScheme("weights", "float16", 16, 4)


@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=300),
    block_size=st.sampled_from([1, 3, 16, 64]),
    prefix_chunk_blocks=st.sampled_from([1, 2, 4]),
    salt=st.sampled_from(["", "tenant"]),
    adapter=st.sampled_from(["", "a", "b"]),
)
def test_the_hashes_equal_the_engines_own(
    token_ids: list[int], block_size: int, prefix_chunk_blocks: int, salt: str, adapter: str
) -> None:
    scheme = HashScheme("w", "bfloat16", block_size, prefix_chunk_blocks)
    root = hashes.root_hash(
        weights_digest="w", kv_dtype="bfloat16", block_size=block_size, adapter_digest=adapter, salt=salt
    )
    blocks = hashes.block_hashes(root, token_ids, block_size)
    for _ in range(2):
        found = PromptHashes(8).hashes(scheme, salt, token_ids, adapter_digest=adapter)
        assert list(found) == blocks[prefix_chunk_blocks - 1 :: prefix_chunk_blocks]


def test_a_grown_conversation_hashes_only_its_new_prefix_chunks() -> None:
    prompts = PromptHashes(10_000)
    conversation = list(range(6400))
    prompts.hashes(SCHEME, "", conversation)
    assert prompts.num_hashed == 100
    for turn in range(1, 11):
        conversation += [turn] * 128
        assert len(prompts.hashes(SCHEME, "", conversation)) == 100 + 2 * turn
        assert prompts.num_hashed == 100 + 2 * turn
    prompts.hashes(SCHEME, "", [*conversation[:3200], *range(64)])
    assert prompts.num_hashed == 121
    prompts.hashes(SCHEME, "other tenant", conversation)
    assert prompts.num_hashed == 121 + 120, "another salt must share no hash"
    prompts.hashes(SCHEME, "", conversation, adapter_digest="a")
    assert prompts.num_hashed == 121 + 2 * 120, "an adapter must share no hash"


def test_the_cache_of_hashes_is_bounded_and_thread_safe() -> None:
    prompts = PromptHashes(50)
    conversations = [[number] * 640 for number in range(20)]
    expected = [PromptHashes(1000).hashes(SCHEME, "", each) for each in conversations]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: prompts.hashes(SCHEME, "", each), conversations * 5))
    assert found == expected * 5
    assert prompts._chunk.cache_info().currsize <= 50


def test_without_a_known_hash_scheme_there_are_no_hashes() -> None:
    assert PromptHashes(8).hashes(HashScheme("", "", 0, 0), "", [1, 2, 3]) == ()


def test_prompt_keys_are_derived_from_the_first_user_message_or_the_prompt() -> None:
    system = {"role": "system", "content": "be brief"}
    one, other = ({"role": "user", "content": "q" * 100 + tail} for tail in ("a", "b"))
    keys = [
        prompt_keys(ChatBody(ChatCompletionRequest(model="m", messages=messages)))
        for messages in ([system, one], [one], [other], [{"role": "user", "content": "else"}], [system])
    ]
    assert keys[0] == keys[1] == keys[2]
    assert len({*map(tuple, keys)}) == 3
    texts = prompt_keys(CompletionsBody(CompletionRequest(model="m", prompt=["q" * 101, "q" * 102, "else"])))
    assert texts[0] == texts[1] == keys[0][0] != texts[2]
    ids = prompt_keys(CompletionsBody(CompletionRequest(model="m", prompt=[1, 2, 3])))
    assert len(ids) == 1


def test_a_session_belongs_to_its_key_and_comes_from_the_deployments_header() -> None:
    target = SimpleNamespace(session_header="x-session-id")
    headers = {"x-session-id": "s" * 200, "other": "y"}
    keys = {session_key(target, key_hash, headers.get) for key_hash in ("k1", "k2", None)}
    assert len(keys) == 3
    assert session_key(target, "k1", {"x-session-id": "s" * 201}.get) not in keys
    assert session_key(target, "k1", {}.get) == b""
    assert session_key(SimpleNamespace(session_header=""), "k1", headers.get) == b""
