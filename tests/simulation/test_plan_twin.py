"""The simulated worker follows plans exactly as the real worker's plan table does."""

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.simulate.plan import SimulatedPlan
from worker.protocol import PlanEntry, Probe, SpecPlan
from worker.spec.plan import PlanTable

TIERS = [0, 1, 2, 3, 5, 7]
depths = st.sampled_from(TIERS)
sizes = st.integers(1, 40)


@st.composite
def plans(draw: st.DrawFn) -> SpecPlan:
    edges = sorted(draw(st.sets(sizes, min_size=1, max_size=6)))
    probe = None
    if draw(st.booleans()):
        bucket = draw(st.none() | st.sampled_from([1, 2, 4, 8, 16]))
        probe = Probe(num_steps=draw(depths), rounds=draw(st.integers(1, 5)), max_batch_size=bucket)
    return SpecPlan(
        controller_epoch=1,
        version=1,
        boot_id="b",
        ttl_seconds=draw(st.floats(0.5, 20)),
        entries=[PlanEntry(max_batch_size=edge, num_steps=draw(depths)) for edge in edges],
        dead_band=draw(st.sampled_from([0.0, 0.15, 0.3, 0.5])),
        probe=probe,
    )


steps = st.lists(
    st.tuples(st.just("rounds"), st.tuples(sizes, st.sampled_from([1, 1, 20])))
    | st.tuples(st.just("plan"), plans())
    | st.tuples(st.just("renew"), sizes),
    min_size=1,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_both_give_every_round_the_same_depth(history: list[tuple[str, object]]) -> None:
    real = PlanTable(boot_id="b", candidate_steps=TIERS, fallback_num_steps=2)
    twin = SimulatedPlan(2)
    now, version, held = 0.0, 0, None
    for what, value in history:
        now += 0.3
        if what == "rounds":
            assert isinstance(value, tuple)
            batch_size, count = value
            for _ in range(count):
                depth = real.depth_for_round(batch_size, now)
                assert (depth.num_steps, depth.is_probe) == twin.depth_for_round(batch_size, now)
            continue
        if what == "plan":
            version += 1
            assert isinstance(value, SpecPlan)
            held = value.model_copy(update={"version": version})
        if held is not None:
            real.put(held, now)
            twin.put(held, now)
