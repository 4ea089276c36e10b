"""A worker, a controller and a Prometheus of our own, with traffic: what the checks of dashboards and alerts look at.

The programs are started by their own commands with the configurations a person would use, on free ports. The worker
can be started with faults that are planted while it runs (see `planted`). Everything ends with the context.
"""

import asyncio
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from bench.dashboards import prometheus
from bench.demo.phases import Kind, Phase
from bench.demo.processes import Child, Children, DemoError, port_or_free
from bench.demo.traffic import Traffic

ROOT = Path(__file__).resolve().parents[2]
WORKER = "local"
"""The worker's id in configs/controller.toml."""
READY_SECONDS = 240.0


class Stack:
    """The three processes and their addresses."""

    def __init__(self, *, factor: float = 1.0, is_planted: bool = False) -> None:
        """Choose ports and write files; `start` starts.

        Args:
            factor: scale of the rules' windows and `for` (1: as deployed).
            is_planted: start the worker with faults that `plant` switches.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="slipstream-dashboards-"))
        self._children = Children(self.directory)
        self._is_planted = is_planted
        taken: set[int] = set()
        ports = [port_or_free("127.0.0.1", 0, taken) for _ in range(4)]
        self.worker, self.control, self.controller, address = (f"http://127.0.0.1:{port}" for port in ports)
        self.prometheus = prometheus.Prometheus(address)
        self.journal = self.directory / "journal.sqlite3"
        self.plant_file = self.directory / "plant"
        self._prometheus_port = ports[3]
        self._environment = {
            "SPEC_WORKER_SERVER__PORT": str(ports[0]),
            "SPEC_WORKER_SERVER__CONTROL_PORT": str(ports[1]),
            "SPEC_CONTROLLER_SERVER__PORT": str(ports[2]),
            "SPEC_CONTROLLER_WORKERS": json.dumps([{"id": WORKER, "url": self.control}]),
            "SPEC_CONTROLLER_JOURNAL__PATH": str(self.journal),
            "SPEC_CONTROLLER_SHADOW__NAME": "goodput",
            "SLIPSTREAM_PLANT": str(self.plant_file),
        }
        targets = {"worker": f"127.0.0.1:{ports[0]}", "controller": f"127.0.0.1:{ports[2]}"}
        text = prometheus.configuration(targets, worker=WORKER)
        prometheus.write(self.directory / "prometheus", text, factor=factor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._children.stop()
        if error is None:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            print(f"Logs are kept in {self.directory}", file=sys.stderr)

    def start(self) -> None:
        """Start all three and wait until they are ready."""
        self.start_worker()
        self.start_controller()
        data = self.directory / "prometheus"
        command = [
            "prometheus", f"--config.file={data / 'prometheus.yml'}", f"--storage.tsdb.path={data / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._prometheus_port}", "--log.level=warn",
        ]  # fmt: skip
        self._wait(self._children.start("prometheus", command, {}), self.prometheus.is_ready)
        wait_for("both targets are scraped", lambda: len(self.prometheus.now("up == 1")) == 2, 30)

    def start_worker(self) -> Child:
        """Start the worker and wait until it is ready."""
        program = [str(Path(sys.executable).with_name("spec-worker"))]
        if self._is_planted:
            program = [sys.executable, "-m", "bench.dashboards.planted"]
        command = [*program, "run", "--config", str(ROOT / "configs/worker.toml")]
        return self._start("worker", command, self.worker, {"PYTHONPATH": str(ROOT)})

    def start_controller(self, *, has_file: bool = True, **settings: Any) -> Child:
        """Start the controller with the deployed file or its defaults, and with `SECTION__FIELD=value` where given."""
        command = [str(Path(sys.executable).with_name("spec-controller")), "run"]
        command += ["--config", str(ROOT / "configs/controller.toml")] if has_file else []
        extra = {f"SPEC_CONTROLLER_{name.upper()}": str(value) for name, value in settings.items()}
        return self._start("controller", command, self.controller, extra)

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL."""
        child = next(child for child in self._children.running if child.name == name)
        child.process.kill()
        child.process.wait()
        self._children.running.remove(child)

    def plant(self, fault: str) -> None:
        """Switch the worker's fault on; "" switches it off."""
        self.plant_file.write_text(fault)

    def pin(self, num_steps: int | None) -> None:
        """Pin the worker's depth, or release it."""
        path = f"{self.controller}/v1/workers/{WORKER}/depth"
        with httpx.Client(trust_env=False, timeout=10.0) as http:
            if num_steps is None:
                http.delete(path).raise_for_status()
            else:
                http.put(path, json={"num_steps": num_steps, "ttl_seconds": 600}).raise_for_status()

    def _start(self, name: str, command: list[str], url: str, extra: Mapping[str, str]) -> Child:
        child = self._children.start(name, command, {**self._environment, **extra})

        def is_ready() -> bool:
            with suppress(httpx.TransportError), httpx.Client(trust_env=False, timeout=5.0) as http:
                return http.get(f"{url}/readyz").status_code == 200
            return False

        self._wait(child, is_ready)
        return child

    def _wait(self, child: Child, is_ready: Callable[[], bool]) -> None:
        def ready() -> bool:
            child.check()
            return is_ready()

        wait_for(f"the {child.name} is ready", ready, READY_SECONDS)


class Background:
    """Traffic on a thread of its own until `stop`; a worker that dies ends it quietly."""

    def __init__(self, url: str, kind: Kind, concurrency: int) -> None:
        self._phase = Phase(kind, concurrency, 3600.0)
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        def cancel() -> None:
            if self._task is not None:
                self._task.cancel()

        self._loop.call_soon_threadsafe(cancel)
        self._thread.join(20)

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._send())

    async def _send(self) -> None:
        self._task = asyncio.current_task()
        while True:
            with suppress(DemoError, httpx.HTTPError):
                await send(self._url, self._phase)
            await asyncio.sleep(0.5)


async def send(url: str, phase: Phase) -> None:
    """Send one phase of the demo's traffic."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False))
        models = (await http.get("/v1/models")).json()["data"]
        await Traffic(http, models[0]["id"]).run(phase)


def wait_for(what: str, question: Callable[[], Any], seconds: float, every: float = 0.5) -> float:
    """Ask until the answer is true; return the seconds it took (DemoError when it takes longer than `seconds`)."""
    began = time.monotonic()
    while not question():
        if time.monotonic() - began > seconds:
            raise DemoError(f"not within {seconds:g} s: {what}")
        time.sleep(every)
    return time.monotonic() - began
