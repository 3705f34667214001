"""Reasoning in a streamed answer is shown, counted as output, and not part of the conversation."""

from __future__ import annotations

from pagemill.client import _piece
from pagemill.commands.chat import ChatAnswer


def test_reasoning_counts_as_the_first_token_and_not_as_the_answer() -> None:
    answer = ChatAnswer()
    pieces = [
        _piece({"choices": [{"delta": delta}]})
        for delta in ({"role": "assistant", "content": ""}, {"reasoning_content": "Why?"}, {"content": "So."})
    ]
    assert [piece.reasoning for piece in pieces] == ["", "Why?", ""]
    for piece in pieces:
        answer.add(piece)
    assert answer.text == "So."
    assert answer.first_s == pieces[1].at_s
