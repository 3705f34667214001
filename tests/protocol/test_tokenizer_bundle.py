"""TokenizerBundle of GGUF files and Hugging Face folders gives the token ids that the models were trained with."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import Sequence, Split

from examples import num_examples
from pagemill_api.text import byte_level
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_models.files.gguf_file import GGUFError, GGUFFile
from pagemill_models.sources import SourceError, UnreadableModelError
from pagemill_models.tokenizer_files.generation_defaults import GenerationDefaults
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_models.tokenizer_files.pre_tokenizers import PRE_TOKENIZERS
from pagemill_models.tokenizer_files.resolved_defaults import with_defaults
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.tokenizer_bundle import TokenizerBundle, bundle_digest, eos_ids

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACE = "▁"

tricky = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "2024", "٣٤", "½Ⅷ", "don't", "I'LL", "\r\n\t", "   ", " ", "é", "́", "👨‍👩‍👧"]
)
texts = st.lists(st.one_of(tricky, st.text(max_size=8)), max_size=8).map("".join)


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_path: Path) -> Backend:
    """Return SmolLM2's published pipeline (single digits, then GPT-2 words), assembled by the tokenizers library."""
    metadata = GGUFFile(smollm2_path).metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    reference = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    reference.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    reference.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    reference.add_special_tokens(special)
    return reference


@pytest.mark.model
@settings(max_examples=num_examples(500), deadline=None)
@given(text=texts)
def test_smollm2_encodes_and_decodes_like_its_published_pipeline(smollm2, smollm2_reference, text):
    ids = smollm2.encode(text)
    assert ids == smollm2_reference.encode(text).ids
    assert smollm2.decode(ids) == smollm2_reference.decode(ids)


@pytest.mark.model
@settings(max_examples=num_examples(200), deadline=None)
@given(text=st.text(alphabet=st.characters(max_codepoint=0x1FFFF, exclude_categories=("Cc", "Cs")), max_size=20))
def test_decoding_restores_the_encoded_text_of_smollm2(smollm2, text):
    # The vocabulary lacks some control characters and the first bytes of unassigned planes.
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


@pytest.mark.model
@settings(max_examples=num_examples(300), deadline=None)
@given(ids=st.lists(st.integers(0, 49_300), max_size=30), skip=st.booleans())
def test_smollm2_decodes_any_ids_like_the_tokenizers_library(smollm2, smollm2_reference, ids, skip):
    assert smollm2.decode(ids, skip) == smollm2_reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.model
def test_the_embedded_models_bundle_contains_its_special_tokens(smollm2):
    bundle = smollm2.bundle
    assert (bundle.bos_token, bundle.eos_token, bundle.bos_token_id) == ("<|im_start|>", "<|im_end|>", 1)
    assert bundle.eos_token_ids == [2, 0]
    assert not bundle.add_bos_token
    assert bundle.vocab_size == smollm2.vocab_size == 49_152
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.token_bytes(smollm2.encode(" é")[0]) == " é".encode()


@pytest.mark.model
def test_digests_are_equal_for_equal_content_only(smollm2, smollm2_path):
    bundle = smollm2.bundle
    assert TokenizerBundle.from_bytes(bundle.to_bytes()) == bundle
    assert load_bundle(smollm2_path).digest == bundle.digest
    assert bundle_digest(bundle.to_bytes()) == bundle.digest
    assert len(bundle.digest) == 64
    other = TokenizerBundle(tokenizer_json=bundle.tokenizer_json, chat_template="other")
    assert other.digest != bundle.digest


def test_a_newer_versions_bundle_is_read_without_its_new_fields():
    bundle = TokenizerBundle(tokenizer_json="{}", eos_token_ids=[2])
    newer = msgspec.msgpack.encode(msgspec.msgpack.decode(bundle.to_bytes()) | {"new_field": 1})
    assert TokenizerBundle.from_bytes(newer) == bundle


def test_bytes_that_are_not_a_bundle_are_refused():
    with pytest.raises(PagemillError, match="Not a tokenizer bundle"):
        TokenizerBundle.from_bytes(b"\x81\xa1x\x01")


def test_the_byte_alphabet_equals_that_of_the_tokenizers_library():
    assert set(byte_level.BYTE_OF_CHAR) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_level.BYTE_OF_CHAR.values()) == list(range(256))


def byte_level_metadata(pre: str | None = None, **changes: Any) -> dict[str, Any]:
    """Return a small byte-level vocabulary: the alphabet, a few merges, control and user-defined tokens."""
    merges = ["Ġ h", "e l", "l o", "Ġh el", "1 2", "12 3"]
    tokens = [*sorted(byte_level.BYTE_OF_CHAR), *(merge.replace(" ", "") for merge in merges)]
    types = [NORMAL] * len(tokens)
    extra = [("<|bos|>", CONTROL), ("<|eot_id|>", CONTROL), ("<|end|>", NORMAL), ("<think>", USER_DEFINED)]
    tokens += [token for token, _ in extra]
    types += [kind for _, kind in extra]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|bos|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("123"),
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def test_end_tokens_are_the_declared_ones_and_known_control_tokens(write_gguf):
    metadata = byte_level_metadata("gpt-2", eom_token_id=5)
    bundle = load_bundle(write_gguf(metadata))
    tokens = metadata["tokenizer.ggml.tokens"]
    assert bundle.eos_token_ids == [tokens.index("123"), 5, tokens.index("<|eot_id|>")]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("tekken", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["123", "4"]),
        ("default", ["123", "4"]),
        (None, ["123", "4"]),
    ],
)
def test_digits_are_grouped_as_the_vocabulary_was_trained(write_gguf, pre, pieces):
    tokenizer = Tokenizer(load_bundle(write_gguf(byte_level_metadata(pre))))
    ids = tokenizer.encode("1234", add_special_tokens=False)
    assert [tokenizer.token_text(token_id) for token_id in ids] == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", " ", " 1234", " +", "b", " ?!"]),
        ("default", ["a", " ", " ", "123", "4", " ", "+", "b", " ", "?!"]),
        ("falcon", ["a", " ", " ", "123", "4", " ", "+", "b", " ", "?!"]),
        ("command-r", ["a", "  ", "1", "2", "3", "4", " +", "b", " ?!"]),
        ("bloom", ["a", " ", " 1234", " +b", " ?!"]),
    ],
)
def test_words_are_split_like_in_llama_cpp(pre, pieces):
    """`default` is for unknown vocabularies: single punctuation, then GPT-2's words, then groups of three digits."""
    parsed = json.loads(Backend(models.BPE()).to_str()) | {"pre_tokenizer": PRE_TOKENIZERS[pre].to_json()}
    cutter = Backend.from_str(json.dumps(parsed)).pre_tokenizer
    cut = [text.replace("Ġ", " ") for text, _ in cutter.pre_tokenize_str("a  1234 +b ?!")]
    assert cut == pieces


def test_user_defined_tokens_are_matched_as_a_whole_and_stay_in_the_text(write_gguf):
    tokenizer = Tokenizer(load_bundle(write_gguf(byte_level_metadata("gpt-2"))))
    ids = tokenizer.encode("<think>hi<|eot_id|>", add_special_tokens=False)
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["<think>", "h", "i", "<|eot_id|>"]
    assert tokenizer.decode(ids) == "<think>hi"


@pytest.mark.parametrize(
    ("pre", "declared", "expected"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)],
)
def test_a_beginning_token_is_added_if_the_model_requires_it(write_gguf, pre, declared, expected):
    changes = {} if declared is None else {"add_bos_token": declared}
    tokenizer = Tokenizer(load_bundle(write_gguf(byte_level_metadata(pre, **changes))))
    assert tokenizer.bundle.add_bos_token is expected
    assert (tokenizer.encode("x")[0] == tokenizer.bundle.bos_token_id) is expected
    assert tokenizer.encode("x", add_special_tokens=False) == tokenizer.encode("x")[-1:]


def test_a_qwen_file_without_a_pre_tokenizer_name_gets_that_of_qwen(write_gguf):
    tokenizer = Tokenizer(load_bundle(write_gguf(byte_level_metadata(None), architecture="qwen2")))
    assert len(tokenizer.encode("12")) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "brand-new"}, "the pre-tokenizer `brand-new`"),
        ({"model": "bert"}, "the tokenizer model `bert` is not supported"),
        ({"token_type": [1, 1]}, "2 entries for 266 tokens"),
        ({"merges": ["a b"]}, "entry 0 of `tokenizer.ggml.merges` ('a b')"),
        ({"bos_token_id": 9999}, "`tokenizer.ggml.bos_token_id` is 9999"),
        ({"model": "llama"}, "`tokenizer.ggml.scores` is missing"),
        ({"tokens": ["x" * 600_000], "token_type": [1]}, "has 600000 characters; 2048 is the most"),
        (
            {"tokens": [str(n) * 500 for n in range(1000, 1300)], "token_type": [1] * 300, "scores": [0.0] * 300}
            | {"model": "llama", "merges": None},
            "are too long for a file without `tokenizer.ggml.merges`",
        ),
    ],
)
def test_a_contradictory_vocabulary_is_refused(write_gguf, changes, message):
    with pytest.raises(GGUFError) as refused:
        load_bundle(write_gguf({key: each for key, each in byte_level_metadata(**changes).items() if each is not None}))
    assert message in refused.value.message


def test_a_file_without_a_vocabulary_is_refused(write_gguf):
    with pytest.raises(GGUFError, match=r"`tokenizer.ggml.tokens` is missing"):
        load_bundle(write_gguf({"x": 1}))


def test_word_patterns_equal_those_of_transformers_for_the_same_names():
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    shared = set(mapping.GGUF_PRE_TOKENIZER_SPLITS) & set(PRE_TOKENIZERS)
    assert {"llama-bpe", "qwen2", "tekken", "gpt-4o"} <= shared
    for name in shared:
        assert PRE_TOKENIZERS[name].splits == (mapping.GGUF_PRE_TOKENIZER_SPLITS[name],), name


@settings(max_examples=num_examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["gpt2", "llama"]), data=st.data())
def test_a_damaged_vocabulary_gives_a_source_error_or_a_tokenizer(tmp_path, write_gguf, kind, data):
    path = tmp_path / f"{kind}.gguf"
    if not path.exists():
        write_gguf(byte_level_metadata() if kind == "gpt2" else sentencepiece_metadata()).rename(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    try:
        tokenizer = Tokenizer(load_bundle(damaged))
    except SourceError:
        return
    assert isinstance(tokenizer.decode(tokenizer.encode("the 12 ü")), str)


CORPUS = ["the quick brown fox jumps over the lazy dog", "hello there world", "über façade naïve", "aaa bbb aaab"] * 4


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Return a vocabulary in SentencePiece's order: control tokens, 256 bytes, then pieces from the best score down."""
    trained = Backend(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=220, show_progress=False)
    trained.train_from_iterator([SPACE + line.replace(" ", SPACE) for line in CORPUS], trainer)
    pieces = [piece for piece, _ in sorted(trained.get_vocab().items(), key=lambda entry: entry[1])]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def sentencepiece_reference(metadata: dict[str, Any], text: str) -> list[int]:
    """Encode by the algorithm's definition: merge the adjacent pair whose joined piece scores best, leftmost first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: index for index, token in enumerate(tokens)}
    symbols = list((SPACE + text).replace(" ", SPACE)) if text else []
    while True:
        joined = [left + right for left, right in itertools.pairwise(symbols)]
        candidates = [(-scores[ids[piece]], index) for index, piece in enumerate(joined) if piece in ids]
        if not candidates:
            break
        _, index = min(candidates)
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
    return [
        token_id
        for symbol in symbols
        for token_id in ([ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()])
    ]


@pytest.fixture(scope="module")
def sentencepiece() -> dict[str, Any]:
    return sentencepiece_metadata()


@settings(max_examples=num_examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(max_size=20), st.text(alphabet="abehlortu  ü", max_size=40)))
def test_sentencepiece_merges_the_best_piece_first_and_falls_back_to_bytes(write_gguf, sentencepiece, text):
    tokenizer = cached_tokenizer(write_gguf, sentencepiece)
    if SPACE in text:  # in that case, the text itself spells a space
        return
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == sentencepiece_reference(sentencepiece, text)
    assert tokenizer.decode(ids) == text


_tokenizers: list[Tokenizer] = []


def cached_tokenizer(write_gguf: Any, metadata: dict[str, Any]) -> Tokenizer:
    if not _tokenizers:
        _tokenizers.append(Tokenizer(load_bundle(write_gguf(metadata))))
    return _tokenizers[0]


def test_sentencepiece_adds_its_beginning_token_unless_set_otherwise(write_gguf, sentencepiece):
    bundle = load_bundle(write_gguf(sentencepiece))
    assert (bundle.bos_token, bundle.eos_token_ids, bundle.add_bos_token) == ("<s>", [2], True)
    assert Tokenizer(bundle).encode("the")[0] == 1
    silent = load_bundle(write_gguf(sentencepiece | {"tokenizer.ggml.add_bos_token": False}))
    assert Tokenizer(silent).encode("the")[0] != 1


def test_sentencepiece_without_a_space_prefix_keeps_the_text_unchanged(write_gguf, sentencepiece):
    tokenizer = Tokenizer(load_bundle(write_gguf(sentencepiece | {"tokenizer.ggml.add_space_prefix": False})))
    ids = tokenizer.encode(" the", add_special_tokens=False)
    assert tokenizer.decode(ids) == " the"
    assert tokenizer.token_text(tokenizer.encode("the", add_special_tokens=False)[0]) != " the"


@pytest.fixture
def folder(tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    """Create a Hugging Face folder for the byte tokenizer, with two special tokens."""
    backend = Backend.from_str(byte_tokenizer.bundle.tokenizer_json)
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|im_end|>", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}})
    write(tmp_path, "config.json", {"vocab_size": 320, "eos_token_id": 7})
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


def test_a_folder_gives_the_same_ids_as_the_tokenizers_library(folder):
    tokenizer = Tokenizer(load_bundle(folder))
    reference = Backend.from_file(str(folder / "tokenizer.json"))
    text = "hé<s> 12<|im_end|>"
    assert tokenizer.encode(text) == reference.encode(text).ids
    assert (tokenizer.bundle.bos_token_id, tokenizer.bundle.eos_token, tokenizer.vocab_size) == (256, "<|im_end|>", 320)


def test_end_tokens_of_a_folder_come_from_all_its_files(folder):
    write(folder, "generation_config.json", {"eos_token_id": [9, 257]})
    assert load_bundle(folder).eos_token_ids == [9, 257, 7]
    (folder / "generation_config.json").unlink()
    assert load_bundle(folder).eos_token_ids == [7, 257]


def test_a_folders_sampling_defaults_are_those_that_vllm_reads(folder):
    write(folder, "generation_config.json", {"temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "do_sample": True})
    bundle = load_bundle(folder)
    assert bundle.sampling_defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    resolved = with_defaults(bundle, "auto", GenerationDefaults(temperature=0.0, min_p=0.1))
    assert resolved.sampling_defaults == {"temperature": 0.0, "top_k": 20, "max_tokens": 99, "min_p": 0.1}
    assert resolved.digest != bundle.digest
    assert TokenizerBundle.from_bytes(resolved.to_bytes()) == resolved
    assert with_defaults(bundle, "vllm", None).sampling_defaults == {}
    write(folder, "generation_config.json", {"temperature": None})
    assert load_bundle(folder).sampling_defaults == {}


@pytest.mark.parametrize(
    ("generation_config", "field"),
    [({"temperature": "hot"}, "temperature"), ({"top_p": 3}, "top_p"), ({"top_k": 1.5}, "top_k")],
)
def test_an_unusable_sampling_default_names_its_file_and_the_remedy(folder, generation_config, field):
    write(folder, "generation_config.json", generation_config)
    with pytest.raises(
        PagemillError, match=f"generation_config.json of the model: {field} must .* set generation_config to vllm"
    ):
        with_defaults(load_bundle(folder), "auto", None)
    assert with_defaults(load_bundle(folder), "vllm", None).sampling_defaults == {}
    with pytest.raises(PagemillError, match="generation_defaults: max_tokens must"):
        with_defaults(load_bundle(folder), "vllm", GenerationDefaults(max_tokens=0))


def test_special_tokens_may_come_from_the_special_tokens_map(folder):
    write(folder, "tokenizer_config.json", {})
    write(folder, "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "pad_token": "<|im_end|>"})
    bundle = load_bundle(folder)
    assert bundle.bos_token == "<s>"
    assert bundle.special_tokens == {"pad_token": "<|im_end|>"}


POST_PROCESSORS = {"none": "$A", "a beginning": "<s> $A", "an end": "$A <|im_end|>", "both": "<s> $A <|im_end|>"}


@pytest.mark.parametrize("template", POST_PROCESSORS.values(), ids=POST_PROCESSORS)
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_the_tokenizer_file_determines_the_added_tokens_like_in_transformers(folder, template, flags):
    special = [("<s>", 256), ("<|im_end|>", 257)]
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    write(folder, "tokenizer_config.json", settings | flags)
    tokenizer = Tokenizer(load_bundle(folder))
    assert tokenizer.encode("a") == transformers.AutoTokenizer.from_pretrained(folder)("a").input_ids
    assert tokenizer.encode("a") == backend.encode("a").ids
    assert tokenizer.bundle.add_bos_token is ("<s>" in template)


def test_chat_templates_come_from_settings_or_files_and_files_take_precedence(folder):
    assert load_bundle(folder).chat_template is None
    write(folder, "tokenizer_config.json", {"chat_template": "plain"})
    assert load_bundle(folder).chat_template == "plain"
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    bundle = load_bundle(folder)
    assert (bundle.chat_template, bundle.tool_chat_template) == ("named", "tools")
    (folder / "chat_template.jinja").write_text("file")
    assert load_bundle(folder).chat_template == "file"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no `tokenizer.json`"),
        ("tokenizer.json", b"{", "not valid JSON"),
        ("tokenizer.json", b"[]", "does not hold a JSON object"),
        ("tokenizer.json", b"\xff\xfe", "not UTF-8"),
        ("tokenizer.json", b"{}", "has no vocabulary"),
        ("tokenizer.json", b'{"model": {"vocab": {}}, "added_tokens": [1]}', "an entry of `added_tokens`"),
        ("tokenizer_config.json", b"nope", "not valid JSON"),
    ],
)
def test_a_broken_folder_is_refused_by_file(folder, name, content, message):
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(UnreadableModelError) as refused:
        load_bundle(folder)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("tokenizer_json", "message"),
    [("{}", "`model` is missing"), ("nonsense", "cannot be loaded")],
)
def test_a_bundle_that_the_library_refuses_is_an_unreadable_model(tokenizer_json, message):
    with pytest.raises(UnreadableModelError, match=message):
        Tokenizer(TokenizerBundle(tokenizer_json=tokenizer_json))


def test_an_unsupported_decoder_is_named(byte_tokenizer):
    backend = Backend.from_str(byte_tokenizer.bundle.tokenizer_json)
    backend.decoder = decoders.CTC()
    with pytest.raises(UnreadableModelError, match="the step `CTC`"):
        Tokenizer(TokenizerBundle(tokenizer_json=backend.to_str()))


def test_word_pieces_are_joined_like_bert_joins_them():
    words = ["[UNK]", "[CLS]", "cat", "##s", "sleep", "##ing"]
    backend = Backend(models.WordPiece(vocab={word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer = Tokenizer(TokenizerBundle(tokenizer_json=backend.to_str()))
    ids = tokenizer.encode("cats sleeping cat")
    assert ids == [2, 3, 4, 5, 2]
    assert tokenizer.decode(ids) == backend.decode(ids) == "cats sleeping cat"


@pytest.mark.parametrize("room", range(4, 16))
@pytest.mark.parametrize("texts", [("cat " * 3, "cat " * 9), ("cat " * 9, "cat " * 3), ("cat " * 9, "cat " * 9)])
def test_pairs_are_truncated_like_the_library_truncates_them(room, texts):
    backend = Backend(models.WordPiece(vocab={"[UNK]": 0, "[SEP]": 1, "cat": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", pair="$A [SEP] $B:1 [SEP]:1", special_tokens=[("[SEP]", 1)]
    )
    tokenizer = Tokenizer(TokenizerBundle(tokenizer_json=backend.to_str()))
    backend.enable_truncation(room)
    ours, theirs = tokenizer.encode_pair(*texts, 0, room, param="text_2"), backend.encode(*texts)
    assert (ours.ids, ours.type_ids) == (theirs.ids, theirs.type_ids)
    assert tokenizer.encode_cut(texts[1], room) == backend.encode(texts[1]).ids


def test_half_a_surrogate_pair_is_a_clients_error(byte_tokenizer):
    with pytest.raises(PagemillError, match="half a surrogate pair at character 2") as refused:
        byte_tokenizer.encode("ab\ud800")
    assert refused.value.status == 400


def test_an_end_of_message_does_not_end_an_answer_with_channels() -> None:
    control = {"<|end|>": 1, "<|endoftext|>": 2}
    assert eos_ids([3], control) == [3, 1, 2]
    assert eos_ids([3], {**control, "<|channel|>": 4}) == [3, 2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen35", [" don", "'t", " 漢字カナ", " नमस्ते", " ", "1", "2", "3", "4"]),
        ("glm4", [" don", "'t", " 漢字カナ", " नमस", "्त", "े", " ", "123", "4"]),
        ("kimi-k2", [" don't", " ", "漢字", "カナ", " नमस्ते", " ", "123", "4"]),
        ("minimax-m2", [" don't", " 漢字カナ", " नमस्ते", " ", "123", "4"]),
        ("deepseek-v3", [" don", "'t", " ", "漢字カナ", " नमस्ते", " ", "123", "4"]),
    ],
)
def test_pre_tokenizers_of_newer_vocabularies_split_words(name: str, words: list[str]) -> None:
    """Marks belong to words of all but GLM's, and Kimi's have Chinese by itself."""
    splits = [Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].splits]
    found = Sequence(splits).pre_tokenize_str(" don't 漢字カナ नमस्ते 1234")
    assert [word for word, _ in found] == words
