"""A whole engine over tiny float64 models, driven step by step in the test's own thread."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from worker.build import build_engine
from worker.config import WorkerConfig
from worker.engine_thread import EngineThread
from worker.graphs.capture import Capture
from worker.protocol import PlanEntry, SpecPlan
from worker.request import Request, SamplingParams, TokenChunk


@dataclass
class Collected:
    """A request and everything it handed out."""

    request: Request
    chunks: list[TokenChunk] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def finish_reason(self) -> str | None:
        return self.chunks[-1].finish_reason if self.chunks else None


class Rig:
    """An engine thread that is never started: tests call `step` themselves."""

    def __init__(self, thread: EngineThread) -> None:
        self.thread = thread
        self.engine = thread.engine
        self._version = 0
        self._ids = 0

    def submit(self, prompt: Sequence[int], eos: Sequence[int] = (), **params: Any) -> Collected:
        params = {"max_tokens": 24, "temperature": 0.0, **params}
        self._ids += 1
        collected: Collected
        request = Request(
            f"request-{self._ids}",
            list(prompt),
            SamplingParams(**params),
            lambda chunk: collected.chunks.append(chunk),
            eos_token_ids=frozenset(eos),
        )
        collected = Collected(request)
        self.thread.submit(request)
        return collected

    def generate(self, prompt: Sequence[int], eos: Sequence[int] = (), **params: Any) -> Collected:
        collected = self.submit(prompt, eos, **params)
        self.thread.run_until_idle()
        return collected

    def set_depth(self, num_steps: int) -> None:
        self._version += 1
        self.thread.put_plan(
            SpecPlan(
                controller_epoch=1,
                version=self._version,
                boot_id=self.thread.info.boot_id,
                ttl_seconds=3600.0,
                entries=[PlanEntry(max_batch_size=64, num_steps=num_steps)],
            )
        )

    def step(self) -> None:
        self.engine.step()

    def assert_idle_and_clean(self) -> None:
        """Nothing is held once nothing runs: the leak oracle."""
        assert not self.thread._scheduler.has_work()
        self.engine._runner.kv.check_integrity()
        queue = self.thread.stats().queue
        assert queue.kv_tokens_free == queue.kv_tokens_total


MakeRig = Callable[..., Rig]


@pytest.fixture(scope="session")
def eagle_writer() -> ModuleType:
    """The module `eagle_writer.py`: `write_head(target, directory, layout, …)`, `write_calm_target(…)`."""
    spec = importlib.util.spec_from_file_location("eagle_writer", Path(__file__).parent / "eagle_writer.py")
    if spec is None or spec.loader is None:
        raise ImportError("tests/worker/eagle_writer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def eagle_dirs(
    tiny_model_dir: Callable[..., Path], eagle_writer: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """`eagle_dirs(layout, **head)` → (a calm target, a head for it); equal parameters give the same directories."""
    target = eagle_writer.write_calm_target(tiny_model_dir(), tmp_path_factory.mktemp("calm-target"))

    @functools.cache
    def make(layout: str = "EAGLE-1", **head: Any) -> tuple[Path, Path]:
        return target, eagle_writer.write_head(target, tmp_path_factory.mktemp("head"), layout, **head)

    return make


@pytest.fixture
def make_rig(tiny_model_dir: Callable[..., Path], eagle_dirs: Callable[..., tuple[Path, Path]]) -> MakeRig:
    """`make_rig(drafter="model", draft={...}, target={...}, spec={...}, engine={...})`; draft=None: the target.

    With `drafter="eagle"` the target is a calm one and `draft` has the parameters of `eagle_dirs`; `calm=True` takes
    that target with another drafter. `capture` captures the forwards of rounds.
    """

    def make(
        *,
        drafter: str = "model",
        target: dict[str, Any] | None = None,
        draft: dict[str, Any] | None = None,
        spec: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        calm: bool = False,
        capture: Capture | None = None,
        dtype: str = "float64",
    ) -> Rig:
        is_eagle = drafter in ("eagle", "ngram+eagle")
        calm_path, head_path = eagle_dirs(**(draft or {} if is_eagle else {}))
        path = calm_path if calm or is_eagle else tiny_model_dir(**(target or {}))
        spec_values: dict[str, Any] = {"drafter": drafter, "num_steps": 0, **(spec or {})}
        if drafter == "model":
            spec_values["draft_model_path"] = str(path if draft is None else tiny_model_dir(**draft))
        if is_eagle:
            spec_values["draft_model_path"] = str(head_path)
        config = WorkerConfig(
            model={"path": str(path), "dtype": dtype, "device": "cpu", "threads": 1},
            spec=spec_values,
            engine={
                "max_running_requests": 8,
                "max_context_tokens": 256,
                "prefill_chunk_tokens": 32,
                "profile_seconds": 0,
                **(engine or {}),
            },
        )
        return Rig(build_engine(config, capture=capture))

    return make
