"""Server-sent events on the wire."""

import json

from hypothesis import given
from hypothesis import strategies as st

from worker.api.streaming import event

EVERY_LINE_END = "a\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029z"
"""All that `str.splitlines` cuts at."""


@given(st.text() | st.text(alphabet=EVERY_LINE_END))
def test_an_event_is_one_line_for_every_client(text: str) -> None:
    sent = event({"text": text}).decode()
    line, *rest = sent.splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == {"text": text}


def test_other_text_stays_readable() -> None:
    assert event({"text": "naïve 日本語"}) == 'data: {"text":"naïve 日本語"}\n\n'.encode()
