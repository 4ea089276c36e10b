"""Lookup where the text was there before, else the head: plain decoding's tokens, and each for what it is good at."""

import pytest

PERIOD = [(i * 29 + 7) % 250 for i in range(12)]
FRESH = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]
SAMPLED = {"temperature": 0.9, "seed": 5}


@pytest.mark.parametrize("prompt", [PERIOD * 4, FRESH], ids=["repeating", "fresh"])
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_every_depth_gives_the_tokens_of_plain_decoding(make_rig, prompt, params):
    rig = make_rig(drafter="ngram+eagle")
    assert (rig.thread.info.drafter, rig.thread.info.fast_path) == ("ngram+eagle", "on")
    plain = rig.generate(prompt, max_tokens=40, **params)
    for num_steps in (1, 2, 3, 5, 7):
        rig.set_depth(num_steps)
        assert rig.generate(prompt, max_tokens=40, **params).tokens == plain.tokens
    rig.assert_idle_and_clean()
    assert not rig.engine.drafter.head._kv_lengths


def test_who_drafts_depends_on_the_text_and_a_mixed_batch_has_both(make_rig, monkeypatch):
    rig = make_rig(drafter="ngram+eagle", spec={"ngram_min": 1, "ngram_max": 1})
    drafter, budgets = rig.engine.drafter, []
    draft, propose = drafter.head.draft, drafter._lookup.propose
    found = {}

    def noting(batch):
        budgets.append(dict(zip((r.id for r in batch.requests), batch.row_budgets, strict=True)))
        return draft(batch)

    def looking(request, limit):
        found[request.id] = tokens = propose(request, limit)
        return tokens

    monkeypatch.setattr(drafter.head, "draft", noting)
    monkeypatch.setattr(drafter._lookup, "propose", looking)
    rig.set_depth(2)
    alone = [rig.generate(FRESH, max_tokens=40, seed=i, temperature=0.9).tokens for i in range(3)]
    budgets.clear()
    streams = [rig.submit(FRESH, max_tokens=40, seed=i, temperature=0.9) for i in range(3)]
    echo = rig.submit([*FRESH, *alone[0], *FRESH], max_tokens=40, seed=9, temperature=0.9)
    kinds = set()
    while rig.thread._scheduler.has_work():
        found.clear()
        before = len(budgets)
        rig.step()
        for asked in budgets[before:]:
            for name, budget in asked.items():
                assert not (budget and found.get(name))  # never both
                kinds.add("head" if budget else "lookup" if found.get(name) else "none")
    assert kinds >= {"head", "lookup"}
    assert [s.tokens for s in streams] == alone
    assert echo.request.spec.proposed_drafts > 0


def test_the_heads_limit_ends_its_drafts_and_not_the_lookups(make_rig):
    rig = make_rig(drafter="ngram+eagle", draft={"max_positions": 32})
    rig.set_depth(3)
    done = rig.generate(PERIOD * 5, max_tokens=30, ignore_eos=True)
    plain = make_rig(drafter="none", spec={"candidate_steps": [0]}, calm=True)
    assert done.tokens == plain.generate(PERIOD * 5, max_tokens=30, ignore_eos=True).tokens
    assert rig.engine.drafter.head.kv_length(0) == 0  # past its positions the head never ran
    assert rig.engine.drafter.max_context_tokens is None


def test_acceptance_does_not_suffer_when_lookup_left_the_head_behind(make_rig, monkeypatch):
    """The head's drafts at a place are the same whether or not lookup served the rounds before."""
    alone, both = make_rig(drafter="eagle"), make_rig(drafter="ngram+eagle", spec={"ngram_max": 2})
    seen: dict[str, dict[int, list[int]]] = {"alone": {}, "both": {}}
    for name, rig in (("alone", alone), ("both", both)):
        head = rig.engine.drafter if name == "alone" else rig.engine.drafter.head
        rows = head._draft_rows

        def noting(requests, rows=rows, name=name):
            tree = rows(requests)
            for request, row in zip(requests, tree.draft_tokens.tolist(), strict=True):
                seen[name][request.committed] = row
            return tree

        monkeypatch.setattr(head, "_draft_rows", noting)
        rig.set_depth(3)
        rig.generate(PERIOD * 3, max_tokens=120, **SAMPLED)
    common = seen["alone"].keys() & seen["both"].keys()
    assert len(common) > 10
    assert len(seen["both"]) < len(seen["alone"])  # lookup served some
    assert all(seen["alone"][place] == seen["both"][place] for place in common)
