"""A stateful machine drives the engine: whatever happens in whatever order, every request gets plain decoding's tokens.

One engine for all examples; each ends drained, and the leak oracle is asked then. Oracle: another engine at depth 0
that runs one request at a time.
"""

import functools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from worker.request import Phase

ENGINE = {
    "max_running_requests": 3,
    "max_kv_tokens": 150,
    "prefill_chunk_tokens": 8,
    "max_context_tokens": 96,
}
PROMPTS = [
    [(i * k + k) % 250 for i in range(n)]
    for n, k in ((1, 5), (2, 3), (7, 11), (8, 11), (17, 11), (40, 11), (33, 2))
]

requests = st.tuples(
    st.sampled_from(range(len(PROMPTS))),
    st.integers(1, 40),  # max_tokens
    st.sampled_from([0.0, 0.8]),
    st.integers(0, 3),  # seed
    st.sampled_from([(), (40, 90, 200)]),  # eos
    st.sampled_from([0, 3]),  # min_tokens
    st.sampled_from([None, None, 0, 1]),  # the request's own cap
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("drafter", "draft", "spec"),
    [
        ("model", {"noise": 0.1}, {}),
        ("model", {"noise": 0.5}, {"topk": 3, "num_draft_tokens": 9}),
        ("eagle", None, {"topk": 2}),
        ("ngram+eagle", None, {}),
        ("ngram", None, {}),
    ],
)
def test_any_history_gives_plain_decodings_tokens(make_rig, drafter, draft, spec):
    rig = make_rig(drafter=drafter, draft=draft, spec=spec, engine=ENGINE)
    plain_rig = make_rig(
        drafter="none", spec={"candidate_steps": [0]}, engine=ENGINE, calm="eagle" in drafter
    )

    def kwargs(choice):
        prompt, max_tokens, temperature, seed, eos, min_tokens, _ = choice
        params = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "min_tokens": min_tokens,
        }
        return PROMPTS[prompt], eos, params

    @functools.cache
    def plain(choice):
        prompt, eos, params = kwargs(choice)
        done = plain_rig.generate(prompt, eos, **params)
        return done.tokens, done.finish_reason

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.live = []

        @rule(choice=requests)
        def submit(self, choice):
            prompt, eos, params = kwargs(choice)
            self.live.append((choice, rig.submit(prompt, eos, max_num_steps=choice[-1], **params)))

        @rule(num_steps=st.sampled_from([0, 1, 2, 3, 5, 7]))
        def change_plan(self, num_steps):
            rig.set_depth(num_steps)

        @rule(rounds=st.integers(1, 5))
        def run(self, rounds):
            for _ in range(rounds):
                rig.step()

        @rule(index=st.integers(0, 9))
        def abort(self, index):
            if self.live:
                rig.thread.abort(self.live[index % len(self.live)][1].request.id)

        @rule(index=st.integers(0, 9))
        def preempt(self, index):
            running = [c for _, c in self.live if c.request.slot is not None]
            if running:
                slot = rig.thread._scheduler.preempt(running[index % len(running)].request)
                rig.engine._release_draft(slot)

        @invariant()
        def counts_agree(self):
            slots = [c.request.slot for _, c in self.live if c.request.slot is not None]
            assert len(set(slots)) == len(slots) <= ENGINE["max_running_requests"]
            assert rig.engine._runner.kv.num_free_slots == ENGINE["max_running_requests"] - len(slots)
            stats = rig.thread.stats()
            assert stats.generated_tokens == stats.first_tokens + sum(b.emitted_tokens for b in stats.buckets)
            for bucket in stats.buckets:
                assert len(bucket.reached) == bucket.num_steps
                for correct, reached, proposed in zip(
                    bucket.correct, bucket.reached, bucket.proposed, strict=True
                ):
                    assert correct <= reached <= bucket.request_rounds
                    assert correct <= proposed

        @invariant()
        def outputs_are_prefixes_of_plain_decoding(self):
            for choice, collected in self.live:
                tokens, reason = plain(choice)
                assert collected.tokens == collected.request.output_ids
                assert tokens[: len(collected.tokens)] == collected.tokens
                if collected.request.phase is Phase.FINISHED and collected.finish_reason != "abort":
                    assert (collected.tokens, collected.finish_reason) == (tokens, reason)

        def teardown(self):
            rig.thread.run_until_idle()
            self.outputs_are_prefixes_of_plain_decoding()
            assert all(c.request.phase is Phase.FINISHED for _, c in self.live)
            rig.assert_idle_and_clean()
            drafters = [rig.engine.drafter, getattr(rig.engine.drafter, "head", None)]
            drafters.append(getattr(rig.engine.drafter, "_lookup", None))
            kept = ("_kv_lengths", "_indexes", "_branches")
            assert not any(getattr(drafter, name, None) for drafter in drafters for name in kept)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
