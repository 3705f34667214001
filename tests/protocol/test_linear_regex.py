"""Which regular expressions of tokenizers are known to split every text in linear time."""

from __future__ import annotations

import re
import time

import pytest
from tokenizers import Regex, pre_tokenizers

from pagemill_api.text.rules.linear_regex import NotLinear, least_chars
from pagemill_api.text.words import GPT2
from pagemill_models.tokenizer_files.pre_tokenizers import PRE_TOKENIZERS

_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'ll)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'ll)?"
)
PUBLISHED = {
    "GPT-2": GPT2,
    "Kimi": rf"[\p{{Han}}]+|{_CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "OLMo 2": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+",
    "DeepSeek": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "DeepSeek's ideographs": "[一-龥぀-ゟ゠-ヿ]+",
    "BLOOM": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "CLIP": r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "XLM-RoBERTa": " {2,}",
    "words": r"\w+|[^\w\s]+",
    **{f"GGUF {name}": "|".join(each.splits) for name, each in PRE_TOKENIZERS.items() if len(each.splits) == 1},
}
NOT_LINEAR = [
    *(r"(?:a|a)*b", r"(a+)+b", r"(x+x+)+y", r"(.*)*", r"(a|aa)+$"),  # exponential
    *(r"a*a*b", r".*.*.*b", r"a+b", r"\s+$", r"[ab]+b", r"\s*x|\s|\s+", r"\s*x| \s+", r"a+(?!a)"),  # a power of it
    *(r"(?:a?){30}a{30}", r"((a{1,100}){1,100}){1,100}", r"a{0,200}a{0,200}b"),  # bounded, but large
    *(r"(?=(a+)+b)", r"(?<=a+)b", r"\1", r"a**", r"a+?b", r"a*(?:(?!b))?", "(" * 30 + "a" + ")" * 30),
    *("[a", "(a", "a)", "[]a]", "a" * 3000, "|".join("abcdef" * 40)),
]


@pytest.mark.parametrize("pattern", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_the_expressions_of_published_tokenizers_are_linear(pattern: str) -> None:
    assert least_chars(pattern) == 1 if pattern != " {2,}" else 2


@pytest.mark.parametrize("pattern", NOT_LINEAR, ids=lambda pattern: pattern[:30])
def test_an_expression_that_may_take_more_than_linear_time_is_refused(pattern: str) -> None:
    with pytest.raises(NotLinear):
        least_chars(pattern)


def test_an_expression_that_matches_nothing_is_recognized() -> None:
    assert least_chars(r"a*|b") == 0


@pytest.mark.parametrize("pattern", [each for each in PUBLISHED.values() if "\\p" in each][:8])
def test_linear_expressions_split_the_hardest_texts_in_linear_time(pattern: str) -> None:
    """Runs of one kind, which each alternative begins and none but the last ends."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    units = (" ", "\t", "\n ", "A", "a", "Aa", "ª", "1", "!", "'", " x", "中", "́")

    def seconds(unit: str, num: int) -> float:
        began = time.thread_time()
        split.pre_tokenize_str(unit * num + "\x00")
        return time.thread_time() - began

    for unit in units:
        assert min(seconds(unit, 4000) for _ in range(2)) < 16 * (min(seconds(unit, 1000) for _ in range(3)) + 0.001)


def test_python_runs_accepted_expressions_in_linear_time_too() -> None:
    """`words` translates them to Python's, which hold the interpreter while they run."""
    pattern = re.compile(r"\s*[\r\n]+|\s+(?!\S)|\s+|\S+", re.ASCII)
    began = time.thread_time()
    pattern.findall(" " * 50_000 + "x")
    assert time.thread_time() - began < 0.5
