"""The rules of the layout: who may import whom, and how large a module may grow."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(p for package in ("controller", "worker") for p in (ROOT / package).rglob("*.py"))

CORE = ["controller/types.py", "controller/guards.py"]
CORE += sorted(
    str(p.relative_to(ROOT)) for d in ("estimate", "policies") for p in (ROOT / "controller" / d).glob("*.py")
)
IO_AND_TIME = {
    "asyncio", "datetime", "http", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets",
    "shutil", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "urllib",
}  # fmt: skip
CORE_MAY_USE = {"types", "estimate", "guards", "policies"}


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module imported anywhere in a file, by its full name (`from a import b` yields a and a.b)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join(
                    [*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])]
                )
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> set[str]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return set(imports(ast.parse(path.read_text(encoding="utf-8")), package))


def violations(path: str, found: set[str]) -> list[str]:
    """Return the imports that the arrows of the design forbid for a file."""
    bad = []
    for name in sorted(found):
        head, _, rest = name.partition(".")
        if path.startswith("worker/") and head == "controller":
            bad.append(name)
        if path.startswith("controller/") and head == "worker" and rest.split(".")[0] != "protocol" and rest:
            bad.append(name)
        if path.startswith("controller/") and head in (
            "torch",
            "transformers",
            "numpy",
            "safetensors",
            "gguf",
        ):
            bad.append(name)
        if path == "worker/protocol.py" and head not in sys.stdlib_module_names | {"pydantic"}:
            bad.append(name)
        if path in CORE:
            is_ours = head == "controller" and (not rest or rest.split(".")[0] in CORE_MAY_USE)
            if (head not in sys.stdlib_module_names and not is_ours) or head in IO_AND_TIME:
                bad.append(name)
    return bad


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_go_one_way(path: Path) -> None:
    assert violations(str(path.relative_to(ROOT)), imports_of(path)) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("worker/engine.py", "from controller.types import Mode"),
        ("worker/engine.py", "import controller"),
        ("controller/loop.py", "from worker.config import WorkerConfig"),
        ("controller/loop.py", "from worker import config"),
        ("controller/loop.py", "import torch"),
        ("controller/policies/threshold.py", "import time"),
        ("controller/policies/threshold.py", "from controller.worker_client import WorkerError"),
        ("controller/policies/threshold.py", "from controller import loop"),
        ("controller/policies/threshold.py", "from ..journal import Record"),
        ("controller/guards.py", "import pydantic"),
        ("controller/guards.py", "from worker.protocol import SpecPlan"),
        ("worker/protocol.py", "import torch"),
        ("worker/protocol.py", "from worker.config import WorkerConfig"),
    ],
)
def test_the_rule_would_notice(path: str, line: str) -> None:
    package = path.rpartition("/")[0].replace("/", ".")
    assert violations(path, set(imports(ast.parse(line), package)))


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("controller/loop.py", "from worker.protocol import SpecPlan"),
        ("controller/policies/threshold.py", "from controller.types import Estimate"),
        ("controller/policies/threshold.py", "import math"),
    ],
)
def test_the_rule_lets_through_what_is_right(path: str, line: str) -> None:
    package = path.rpartition("/")[0].replace("/", ".")
    assert violations(path, set(imports(ast.parse(line), package))) == []


def test_importing_the_controller_loads_no_torch() -> None:
    import subprocess

    code = "import sys, controller.cli; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_stay_small_and_named_for_what_they_do(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300, "more than 300 lines: split it"
    assert path.name not in ("utils.py", "helpers.py", "common.py", "misc.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert not [n for n in names if n.endswith(("Manager", "Helper", "Handler", "Utils"))]


LONGEST_FUNCTION = 60


def test_functions_fit_on_a_screen() -> None:
    long = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (node.end_lineno or node.lineno) - node.lineno + 1 > LONGEST_FUNCTION:
                long.add(f"{path.relative_to(ROOT)}: {node.name}")
    assert not long
