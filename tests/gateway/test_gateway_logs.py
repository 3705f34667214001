"""Every line of the gateway's log is one line of JSON, whatever the message contains."""

from __future__ import annotations

import json
import logging
import sys

from hypothesis import given
from hypothesis import strategies as st

from pagemill_gateway.logs import STRUCTURED
from pagemill_gateway.request_record import RequestRecord
from pagemill_gateway.routes.access import _line
from pagemill_protocol.request.generate import Usage
from pagemill_servers.process.logs import JsonLines

ANY_TEXT = st.text(st.characters(exclude_categories=())) | st.sampled_from(
    ["\ud800", "a\nb", "\u2028", "\x00", '"}{"a":"']
)


@given(ANY_TEXT, st.booleans())
def test_any_message_is_one_line_of_json(text: str, fails: bool) -> None:
    fault = None
    if fails:
        try:
            raise ValueError(text)
        except ValueError:
            fault = sys.exc_info()
    record = logging.LogRecord("any", logging.INFO, __file__, 1, "%s", (text,), fault)
    line = JsonLines(structured=STRUCTURED).format(record)
    assert not set(line) & {"\r", "\n"}
    reported = json.loads(line)
    assert reported["message"] == text.encode("utf-8", "replace").decode()
    assert ("exception" in reported) == fails


def test_a_message_that_is_json_keeps_its_fields() -> None:
    record = logging.LogRecord(
        "pagemill.gateway.access", logging.INFO, __file__, 1, '{"event":"request","n":1}', (), None
    )
    reported = json.loads(JsonLines(structured=STRUCTURED).format(record))
    assert (reported["event"], reported["n"], reported["level"]) == ("request", 1, "info")


def test_a_requests_line_counts_proposed_and_accepted_tokens_of_all_its_attempts() -> None:
    record = RequestRecord(route="/v1/completions", status=200)
    for num_accepted in (3, 1):
        record.add_usage(Usage(10, 20, proposed_tokens=5, accepted_tokens=num_accepted))
    line = json.loads(_line(record, "POST", "t"))
    assert (line["proposed_tokens"], line["accepted_tokens"]) == (10, 4)
