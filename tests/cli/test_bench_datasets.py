"""`pagemill bench --dataset` and `--workload`: what is sent follows from the file, whatever its kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagemill.bench.conversations import (
    BenchConversation,
    BenchError,
    BenchTurn,
    BenchWorkload,
    first_requests,
    rotated,
)
from pagemill.bench.datasets import read_dataset
from pagemill.bench.generated import DrawnLengths, drawn, of_generator
from pagemill.bench.texts import TextLengths, words

ONE_EACH = TextLengths()


def read(tmp_path: Path, text: str, sizes: TextLengths = ONE_EACH) -> list[BenchConversation]:
    file = tmp_path / "data"
    file.write_text(text)
    return list(read_dataset(file, 0, sizes).conversations)


def test_conversations_as_in_sharegpt_keep_their_texts_and_have_answers_as_long_as_recorded(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        json.dumps(
            [
                {
                    "id": "x",
                    "conversations": [
                        {"from": "system", "value": "Be brief."},
                        {"from": "human", "value": "One?"},
                        {"from": "gpt", "value": "two three four"},
                        {"from": "human", "value": "Five?"},
                        {"from": "gpt", "value": "six"},
                    ],
                },
                {"conversations": [{"from": "gpt", "value": "an answer without a question"}]},
            ]
        ),
    )
    assert found == [BenchConversation([BenchTurn("One?", 4), BenchTurn("Five?", 1)], "Be brief.")]


def test_lines_may_be_bodies_of_the_api_lines_of_batches_and_plain_prompts(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        {"messages": messages, "max_tokens": 7, "temperature": 0.5, "model": "not this one"},
        {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": messages, "seed": 3}},
        {"prompt": "Hello", "output_tokens": 9, "timestamp": 1500},
        {"prompts": ["a", "b"]},
    ]
    found = read(tmp_path, "\n".join(map(json.dumps, lines)))
    assert [each.turns for each in found] == [
        [BenchTurn("", 7)],
        [BenchTurn("", None)],
        [BenchTurn("Hello", 9)],
        [BenchTurn("a", None), BenchTurn("b", None)],
    ]
    assert [dict(each.extra) for each in found] == [{"temperature": 0.5}, {"seed": 3}, {}, {}]
    assert found[0].messages == messages
    assert found[2].at_s == 1.5


def test_blocks_of_a_mooncake_trace_are_shared_as_recorded(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 27000, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 30000, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 9]},
    ]
    first, second = read(tmp_path, "\n".join(map(json.dumps, lines)))
    texts = [each.turns[0].text.split() for each in (first, second)]
    assert [len(text) for text in texts] == [1500, 1100]
    assert texts[0][:1024] == texts[1][:1024]
    assert texts[0][1024:1100] != texts[1][1024:]
    assert (first.at_s, second.at_s, second.turns[0].output_tokens) == (0.0, 3.0, 6)


def test_sessions_of_a_trace_are_conversations_whose_turns_add_what_is_new(tmp_path: Path) -> None:
    trace = "Timestamp,Session ID,Request tokens,Response tokens\n10,s,100,20\n11,t,30,5\n40,s,150,8\n"
    talk, single = read(tmp_path, trace, TextLengths(per_word=0.5))
    assert [len(turn.text.split()) for turn in talk.turns] == [200, 60]  # 100 and 150 - 100 - 20 tokens
    assert [(turn.output_tokens, turn.not_before_s) for turn in talk.turns] == [(20, 0.0), (8, 30.0)]
    assert (talk.at_s, single.at_s, len(single.turns)) == (0.0, 1.0, 1)


def test_generated_conversations_have_the_lengths_and_share_prefixes_by_group() -> None:
    workload = drawn(DrawnLengths(100, 20, 0.0, 2, 3, 50), 60, seed=1, sizes=ONE_EACH)
    assert workload.num_requests == 60
    assert {len(turn.text.split()) for each in workload.conversations for turn in each.turns} == {100}
    assert len({each.system for each in workload.conversations}) == 3
    assert len({turn.text for each in workload.conversations for turn in each.turns}) == 60
    spread = drawn(DrawnLengths(100, 20, 0.7, 1, 0, 50), 2000, seed=1, sizes=ONE_EACH)
    lengths = [len(each.turns[0].text.split()) for each in spread.conversations]
    assert 90 < sum(lengths) / len(lengths) < 110
    assert max(lengths) > 300


def test_workloads_of_the_simulator_are_played_with_their_sessions_and_times() -> None:
    workload = of_generator("agentic:sessions_per_s=1,duration_s=20", 3, ONE_EACH)
    assert workload.has_times
    assert max(len(each.turns) for each in workload.conversations) > 3
    assert workload == of_generator("agentic:sessions_per_s=1,duration_s=20", 3, ONE_EACH)


def test_a_longer_text_of_a_name_begins_with_the_shorter() -> None:
    assert words("a", 40).startswith(words("a", 10) + " ")
    assert words("a", 10) != words("b", 10)


def test_a_limit_counts_requests_and_a_later_load_begins_where_the_first_ended() -> None:
    workload = BenchWorkload("", [BenchConversation([BenchTurn(str(each), 1)] * each) for each in (2, 3, 1)])
    assert [len(each.turns) for each in first_requests(workload, 4).conversations] == [2, 2]
    assert [len(each.turns) for each in rotated(workload, 4).conversations] == [1, 2, 3]
    assert rotated(workload, 6) == workload


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a JSON list of conversations"),
        ("[]", "holds no conversation"),
        ('[{"a": 1}]', "entry 1 has no `conversations`"),
        ('{"messages": []}', "data:1: has neither `messages` nor `prompt`"),
        ('{"prompt": "a"}\n{"prompt": 3}', "data:2: has neither"),
        ('{"prompt": "a", "max_tokens": 0}', "expected a number of tokens from 1, got 0"),
        ('{"prompt": "a"}\nnothing', "data:2: expected JSON"),
        ('{"hash_ids": [1], "timestamp": 0}', "data:1: expected timestamp, input_length"),
        ("a,b,c\n1,2,3\n", "no trace of a known kind"),
    ],
)
def test_a_file_that_cannot_be_sent_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BenchError) as error:
        read(tmp_path, text)
    assert words in str(error.value)
    assert str(tmp_path / "data") in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no-such-file: cannot be read"):
        read_dataset(tmp_path / "no-such-file", 0, ONE_EACH)
