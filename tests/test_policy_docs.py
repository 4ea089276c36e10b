"""docs/policy.md tells of every parameter of every policy, with its default."""

import dataclasses
import re
from pathlib import Path

import pytest

from controller.policies import policy_kinds

DOCUMENT = (Path(__file__).parents[1] / "docs/policy.md").read_text(encoding="utf-8")


def documented(policy: str) -> dict[str, str]:
    """Return what the policy's table says: name -> default as it is written there."""
    table = DOCUMENT.split(f"| `{policy}` | default |")[1].split("\n\n")[0]
    found = {}
    for row in table.splitlines():
        if cells := re.match(r"\| (`[^|]+`) \| ([^|]+) \|", row):
            names = re.findall(r"`(\w+)`", cells[1])
            found |= dict(zip(names, cells[2].split(", ") * len(names), strict=False))
    return found


@pytest.mark.parametrize("policy", ["goodput", "threshold"])
def test_every_parameter_is_documented_with_its_default(policy):
    fields = dataclasses.fields(policy_kinds()[policy].parameters)
    table = documented(policy)
    assert set(table) | {"slo_seconds"} >= {field.name for field in fields}
    for field in fields:
        if isinstance(field.default, float):
            assert float(table[field.name]) == field.default, field.name
        elif isinstance(field.default, int | str):
            assert table[field.name].strip('`"') == str(field.default), field.name
