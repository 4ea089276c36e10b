"""Who can be played: the controller's policies by name, every fixed depth, the rivals' rules."""

from collections.abc import Callable, Mapping, Sequence

from controller.config import ControllerConfig
from controller.policies import policy_kinds
from controller.simulate.rivals import SglangEma, SglangThroughput
from controller.simulate.rules import FixedDepth
from controller.simulate.run import RunResult, simulate
from controller.simulate.scenario import Scenario
from controller.simulate.score import Oracle
from controller.simulate.worker import EngineRule
from worker.protocol import LatencyProfile

Rule = Callable[[Scenario, LatencyProfile | None], EngineRule]

RIVALS: Mapping[str, Rule] = {"sglang_ema": SglangEma, "sglang_throughput": SglangThroughput}


def contenders() -> list[str]:
    """Return all names that `play` knows, but for `fixed:K`."""
    return sorted({*policy_kinds(), *RIVALS} - {"static"})


def play(
    name: str, scenario: Scenario, seeds: Sequence[int], base: ControllerConfig | None = None
) -> list[RunResult]:
    """Play one variant of a scenario with each seed.

    Args:
        name: a policy of the controller, a rival, or `fixed:K`.
        scenario: one variant.
        seeds: one run each.
        base: parameters and guards for the controller's policies; its policy's name is replaced.

    Raises:
        ValueError: nobody is called that, or the depth is no tier.
    """
    rule: Rule
    if name.startswith("fixed:"):
        depth = _tier(name.removeprefix("fixed:"), scenario)
        rule = lambda scenario, profile: FixedDepth(depth)  # noqa: E731
        return [simulate(scenario, seed, rule=rule) for seed in seeds]
    if name in RIVALS:
        return [simulate(scenario, seed, rule=RIVALS[name]) for seed in seeds]
    config = configured(name, scenario, base)
    return [simulate(scenario, seed, config=config) for seed in seeds]


def configured(name: str, scenario: Scenario, base: ControllerConfig | None) -> ControllerConfig:
    """Return the controller's configuration for a scenario: its poll interval, the policy named."""
    base = base or ControllerConfig()
    policy = base.policy.model_dump()
    if policy["name"] != name:
        policy |= {"name": name, "parameters": {}, "slots": []}
    loop = base.loop.model_dump() | {"poll_interval_seconds": scenario.poll_interval_seconds}
    loop["plan_ttl_seconds"] = max(loop["plan_ttl_seconds"], 3 * scenario.poll_interval_seconds)
    return ControllerConfig.model_validate(
        {**base.model_dump(exclude={"policy", "loop"}), "policy": policy, "loop": loop}
    )


def play_oracle(scenario: Scenario, seeds: Sequence[int]) -> Oracle:
    """Play every fixed depth."""
    return Oracle.of({depth: play(f"fixed:{depth}", scenario, seeds) for depth in scenario.candidate_steps})


def _tier(text: str, scenario: Scenario) -> int:
    if text.isdigit() and int(text) in scenario.candidate_steps:
        return int(text)
    raise ValueError(f"fixed:{text}: must be one of {scenario.candidate_steps}")
