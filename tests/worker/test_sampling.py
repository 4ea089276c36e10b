"""The one rule of drawing: the right distribution, the same token whatever surrounds it."""

import math

import pytest
import torch

import worker.sampling as sampling_module
import worker.spec.verify as verify_module
from worker.noise import gumbel_noise, hashed_noise
from worker.request import Request, SamplingParams
from worker.sampling import Draw, draw_tokens, filter_logits
from worker.spec.verify import verify

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], dtype=torch.float64)


def params(**values):
    return SamplingParams(**{"max_tokens": 8, "temperature": 1.0, **values})


def oracle(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The filtered distribution, written out slowly and apart from the code under test."""
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    kept = order[: top_k or len(order)]
    mass = sum(weights[i] for i in kept)
    nucleus, total = [], 0.0
    for i in kept:
        if nucleus and total >= top_p:
            break
        nucleus.append(i)
        total += weights[i] / mass
    nucleus = [i for i in nucleus if weights[i] >= min_p * weights[order[0]]]
    mass = sum(weights[i] for i in nucleus)
    return [weights[i] / mass if i in nucleus else 0.0 for i in range(len(weights))]


FILTERS = [
    {},
    {"temperature": 0.5},
    {"top_k": 1},
    {"top_k": 3},
    {"top_p": 0.7},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 4, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_equal_the_oracle(filters):
    target_probs = filter_logits(LOGITS.unsqueeze(0), [params(**filters)]).softmax(-1)[0]
    assert target_probs.tolist() == pytest.approx(oracle(LOGITS, **filters), abs=1e-12)


def test_rows_do_not_touch_each_other():
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(0))
    mixed = [params(**FILTERS[i]) for i in range(8)]
    together = filter_logits(logits, mixed)
    for row in range(8):
        assert torch.equal(together[row : row + 1], filter_logits(logits[row : row + 1], [mixed[row]]))


def test_an_unfiltered_row_keeps_its_tail_beside_filtered_ones():
    # Over a whole vocabulary in float32 the sum of what is likelier rounds to 1 long before the end.
    logits = torch.randn(1, 49152, generator=torch.Generator().manual_seed(0)) * 4
    alone, filtered = params(temperature=1.0), params(temperature=1.0, top_k=50)
    together = filter_logits(logits.repeat(2, 1), [alone, filtered])
    assert torch.equal(together[:1], filter_logits(logits, [alone]))


def chi_square(counts, probs):
    total = sum(counts)
    pairs = [(c, p * total) for c, p in zip(counts, probs, strict=True) if p > 0]
    assert all(c == 0 for c, p in zip(counts, probs, strict=True) if p == 0)
    return sum((c - e) ** 2 / e for c, e in pairs), len(pairs) - 1


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 3}])
def test_draws_follow_the_distribution(filters):
    draws = [Draw(params(**filters), seed, seed % 7) for seed in range(20_000)]
    tokens = draw_tokens(LOGITS.expand(len(draws), -1), draws)
    statistic, freedom = chi_square(torch.bincount(tokens, minlength=6).tolist(), oracle(LOGITS, **filters))
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 10  # far beyond p = 1e-4


def test_neighbouring_seeds_and_positions_are_unrelated():
    base = gumbel_noise(1, 1, 4096)
    for seed, position in ((1, 2), (2, 1), (2, 2), (1 << 62, 1)):
        other = gumbel_noise(seed, position, 4096)
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1]) < 0.06
    assert torch.equal(base, gumbel_noise(1, 1, 4096))
    assert base.isfinite().all()


def test_hashed_noise_is_gumbel_and_a_rows_depends_on_its_own_place_only():
    """What a GPU draws; the hash is integer arithmetic, the same everywhere."""
    places = [(1, 1), (1, 2), (2, 1), (2**63 - 1, 10**6)]
    noise = hashed_noise(places, 40_000, torch.device("cpu"))
    for row, place in enumerate(places):
        assert torch.equal(noise[row], hashed_noise([place], 40_000, torch.device("cpu"))[0])
        ordered = noise[row].sort().values.double()
        expected = torch.exp(-torch.exp(-ordered))  # the distribution function of a standard Gumbel
        empirical = torch.arange(1, 40_001, dtype=torch.float64) / 40_000
        assert (expected - empirical).abs().max() < 1.95 / 200  # Kolmogorov's test, 0.1 %
    correlations = torch.corrcoef(noise) - torch.eye(4)
    assert correlations.abs().max() < 0.025
    assert torch.isfinite(noise).all()


def test_greedy_rows_are_the_argmax_whatever_their_neighbours_do():
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0]] * 3)  # an exact tie: the lowest id wins
    draws = [
        Draw(params(temperature=0, top_p=0.5), 1, 1),
        Draw(params(), 7, 1),
        Draw(params(temperature=0), 2, 1),
    ]
    tokens = draw_tokens(logits, draws).tolist()
    assert tokens[0] == tokens[2] == 1


def test_nan_gives_minus_one_in_its_row_only():
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("nan")
    for temperature in (0.0, 1.0):
        tokens = draw_tokens(logits, [Draw(params(temperature=temperature), 1, 1)] * 3).tolist()
        assert tokens[1] == -1
        assert min(tokens[0], tokens[2]) >= 0


# ---- verify: exact enumeration over a tiny vocabulary ----

VOCAB = 3
TABLE = torch.tensor([[0.2, 1.0, -0.5], [1.5, 0.0, 0.3], [-0.2, 0.4, 0.9]], dtype=torch.float64)
"""A bigram target: row = logits after a token."""


def speculate(seed, length, choose_depth, choose_draft):
    """Emit `length` tokens through `verify`, with any drafts at any depth."""
    done: list[int] = []
    request = Request("r", [0], params(max_tokens=length, temperature=0.9, seed=seed), lambda chunk: None)
    while len(done) < length:
        depth = min(choose_depth(len(done)), length - len(done) - 1)
        draft = [choose_draft(len(done), i) for i in range(depth)]
        rows = torch.tensor([request.token_at(request.committed - 1), *draft])
        (verdict,) = verify(TABLE[rows], [request], rows, [depth])
        assert verdict.num_correct_drafts == len(verdict.accept_tokens) - 1
        done += verdict.accept_tokens
        request.output_ids = list(done)
    return tuple(done)


def test_joint_sequences_follow_the_target_with_depths_and_drafts_at_random():
    """χ² on length-3 sequences; and, seed by seed, the very tokens of plain decoding."""
    generator = torch.Generator().manual_seed(4)
    picks = torch.randint(0, 1 << 30, (4000, 16), generator=generator).tolist()
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4000):
        pick = picks[seed]
        got = speculate(seed, 3, lambda n: pick[n] % 4, lambda n, i: pick[5 + n + i] % VOCAB)  # noqa: B023
        assert got == speculate(seed, 3, lambda n: 0, lambda n, i: 0)
        counts[got] = counts.get(got, 0) + 1
    probs = {}
    for a in range(VOCAB):
        for b in range(VOCAB):
            for c in range(VOCAB):
                chain = [(0, a), (a, b), (b, c)]
                probs[a, b, c] = math.prod(oracle(TABLE[x], temperature=0.9)[y] for x, y in chain)
    keys = sorted(probs)
    statistic, freedom = chi_square([counts.get(k, 0) for k in keys], [probs[k] for k in keys])
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def disagreements(seeds=60):
    """How many seeds give other tokens with wild drafts than without."""
    wild = [speculate(seed, 6, lambda n: 3, lambda n, i: (n + i) % VOCAB) for seed in range(seeds)]
    plain = [speculate(seed, 6, lambda n: 0, lambda n, i: 0) for seed in range(seeds)]
    return sum(a != b for a, b in zip(wild, plain, strict=True))


def test_planted_bugs_are_caught(monkeypatch):
    assert disagreements() == 0
    with monkeypatch.context() as patch:  # a verifier that believes the first draft
        go_on = verify_module._Walk.go_on

        def believe(walk, token):
            drafted = [draft for row, draft in walk._children if row == walk.row == walk.rows.start]
            go_on(walk, drafted[0] if drafted else token)

        patch.setattr(verify_module._Walk, "go_on", believe)
        assert disagreements() > 30
    with monkeypatch.context() as patch:  # noise from one shared stream, as torch.multinomial would use
        stream = torch.Generator().manual_seed(0)
        patch.setattr(
            sampling_module,
            "gumbel_noise",
            lambda seed, position, n: -torch.empty(n).exponential_(generator=stream).log(),
        )
        assert disagreements() > 30
    with monkeypatch.context() as patch:  # noise by row of the round instead of absolute position
        patch.setattr(
            verify_module.Draw,
            "at",
            lambda request, position: Draw(request.params, request.seed, position - request.committed),
        )
        assert disagreements() > 5
