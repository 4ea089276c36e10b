"""Prompt lookup, held against a naive search."""

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.spec.ngram import SuffixIndex


def naive(tokens, limit, sizes):
    for size in sizes:
        if size > len(tokens):
            continue
        suffix = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                out = list(tokens)
                follow = start + size
                while len(out) < len(tokens) + limit:
                    out.append(out[follow])
                    follow += 1
                return out[len(tokens) :]
    return []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=0, max_size=8), min_size=1, max_size=5),
    st.integers(1, 7),
    st.tuples(st.integers(1, 3), st.integers(0, 2)),
)
def test_index_equals_naive_search(pieces, limit, sizes):
    low, extra = sizes
    index = SuffixIndex(ngram_min=low, ngram_max=low + extra)
    tokens = []
    for piece in pieces:  # grown in pieces, as rounds commit them
        index.extend(piece)
        tokens += piece
        assert index.propose(limit) == naive(tokens, limit, range(low + extra, low - 1, -1))


def test_a_period_is_continued():
    index = SuffixIndex(ngram_min=2, ngram_max=4)
    index.extend([1, 2, 3, 1, 2, 3])
    assert index.propose(7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_new_ending_proposes_nothing():
    index = SuffixIndex(ngram_min=2, ngram_max=4)
    index.extend([1, 2, 3, 4, 5])
    assert index.propose(5) == []
