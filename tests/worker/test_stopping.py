"""Stop strings: earliest wins, nothing leaks, and only a true prefix of a stop waits."""

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.stopping import StopScanner

text = st.text(alphabet="abc", max_size=30)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(text, max_size=8),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_pieces_joined_are_the_text_up_to_the_earliest_stop(pieces, stops):
    scanner = StopScanner(stops)
    shown, whole = "", ""
    for piece in pieces:
        if scanner.matched is None:
            whole += piece
        shown += scanner.push(piece)
    shown += scanner.finish()
    begins = [whole.find(stop) for stop in stops if stop in whole]
    assert shown == (whole[: min(begins)] if begins else whole)
    assert (scanner.matched is not None) == bool(begins)


def test_only_a_proper_prefix_is_held_back():
    scanner = StopScanner(["STOP" * 10])
    assert scanner.push("hello world") == "hello world"
    assert scanner.push(" ST") == " "
    assert scanner.push("ART") == "START"
    assert scanner.finish() == ""
    assert scanner.push("STO") == ""
    assert scanner.finish() == "STO"


def test_a_stop_split_over_pieces_is_found_and_dropped():
    scanner = StopScanner(["\n\n", "END"])
    assert scanner.push("one\n") == "one"
    assert scanner.push("\ntwo END") == ""
    assert scanner.matched == "\n\n"
    assert scanner.push("more") == ""
