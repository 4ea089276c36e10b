"""One demonstration from start to summary: ports, the two programs, the phases.

Both programs are started by their own console commands with the configurations a person would use. What differs is set
by the environment variables that override any field, and said: ports that are taken (and what follows from them), a
controller that is not told of this worker, the head of the default model beside the configuration that comes with it.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console

from bench.demo.display import Display, decision_line, open_display, summary
from bench.demo.phases import Phase, schedule
from bench.demo.processes import Children, DemoError, port_or_free
from bench.demo.traffic import Traffic
from bench.demo.watch import POLL_SECONDS, PhaseResult, Watch, merge
from controller.app.access import AccessError as ControllerAccessError
from controller.app.access import read_tokens
from controller.config import load_config as load_controller_config
from worker.access import AccessError as WorkerAccessError
from worker.access import read_api_key, read_control_tokens
from worker.config import WorkerConfig
from worker.config import load_config as load_worker_config
from worker.protocol import SpecInfo

READY_SECONDS = 600.0
"""Loading, warm-up and self-check of the model on a slow machine; a dead child ends the wait at once."""

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
HEAD = CONFIGS / "heads/smollm2-135m-instruct"
JOURNAL_PATH = "SPEC_CONTROLLER_JOURNAL__PATH"


class Endpoint(NamedTuple):
    """Where a program is reached, and the bearer token that it wants."""

    url: str
    token: str | None

    def client(self) -> httpx.AsyncClient:
        """Return a client that is not opened yet."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=10.0, trust_env=False)


@dataclass(frozen=True)
class Addresses:
    """Where everything is, and the environment that makes the programs listen there."""

    worker: Endpoint
    worker_control: Endpoint
    controller: Endpoint
    worker_environment: dict[str, str]
    controller_environment: dict[str, str]
    notes: list[str]


class Session:
    """Runs one demonstration; the caller owns the children and stops them."""

    def __init__(self, options: argparse.Namespace, console: Console, children: Children) -> None:
        self._options = options
        self._console = console
        self._children = children

    async def run(self) -> None:
        """Start both programs, then send the phases or just serve.

        Raises:
            DemoError: a program died or a request failed.
        """
        addresses = choose_addresses(self._options.worker_config, self._options.controller_config)
        for note in addresses.notes:
            self._say(note)
        if not self._options.no_traffic and JOURNAL_PATH not in os.environ:
            # The demo begins from nothing: no pin or mode of an earlier one, and none kept for a later one.
            addresses.controller_environment[JOURNAL_PATH] = ":memory:"
        async with AsyncExitStack() as stack:
            worker, control, controller = [
                await stack.enter_async_context(endpoint.client())
                for endpoint in (addresses.worker, addresses.worker_control, addresses.controller)
            ]
            await self._start(
                "worker", "spec-worker", self._options.worker_config, addresses.worker_environment, worker
            )
            await self._start(
                "controller",
                "spec-controller",
                self._options.controller_config,
                addresses.controller_environment,
                controller,
            )
            info = SpecInfo.model_validate_json((await control.get("/v1/spec/info")).content)
            self._introduce(addresses, info)
            if self._options.no_traffic:
                await self._serve(Watch(control, controller, lambda it: self._say(decision_line(it))))
            else:
                await self._show(Traffic(worker, info.model), control, controller)

    async def _start(
        self, name: str, command: str, config: Path, environment: dict[str, str], client: httpx.AsyncClient
    ) -> None:
        """Start a program and wait until it says that it is ready."""
        program = Path(sys.executable).with_name(command)
        child = self._children.start(name, [str(program), "run", "--config", str(config)], environment)
        self._say(f"Starting the {name} ({command} run --config {config}) …")
        began = time.monotonic()
        while not await is_ready(client):
            child.check()
            if time.monotonic() - began > READY_SECONDS:
                raise DemoError(f"the {name} was not ready after {READY_SECONDS:g} s:\n{child.tail()}")
            await asyncio.sleep(0.2)
        self._say(f"The {name} is ready after {time.monotonic() - began:.1f} s.")

    def _introduce(self, addresses: Addresses, info: SpecInfo) -> None:
        worker, controller = addresses.worker.url, addresses.controller.url
        self._say(
            f"\nModel {info.model} on {info.device} in {info.dtype}; drafter: {DRAFTERS[info.drafter]}.\n"
            f"Depths that can be chosen: {info.candidate_steps}; without a plan: {info.fallback_num_steps}.\n"
            f"  page        {controller}/   (workers, charts, decisions, pins)\n"
            f"  worker      {worker}/v1/chat/completions   {worker}/metrics\n"
            f"  controller  {controller}/v1/workers   {controller}/v1/decisions\n"
            f"  plan        {addresses.worker_control.url}/v1/spec/plan\n"
            "Ctrl-C ends everything.\n"
        )

    async def _serve(self, watch: Watch) -> None:
        """Tell decisions as they come, until the duration is over or for ever."""
        seconds = self._options.duration
        end = None if seconds is None else time.monotonic() + seconds
        while end is None or time.monotonic() < end:
            self._children.check()
            await watch.poll()
            await asyncio.sleep(POLL_SECONDS)

    async def _show(
        self, traffic: Traffic, control: httpx.AsyncClient, controller: httpx.AsyncClient
    ) -> None:
        """Send the phases and show them; the summary comes last, also after Ctrl-C or a failure."""
        results: list[PhaseResult] = []
        display = open_display(self._console, results)
        watch = Watch(control, controller, display.decision)
        try:
            for phase in schedule(self._options.duration):
                await watch.until_idle()
                results.append(watch.begin(phase))
                display.say(f"phase: {phase.label} for {phase.seconds:g} s")
                await self._phase(phase, traffic, watch, display)
        finally:
            display.close()
            self._console.print(summary(merge(results)))
            self._say(
                f"{traffic.finished_total} requests finished; those cut by the end of a phase not counted."
            )

    async def _phase(self, phase: Phase, traffic: Traffic, watch: Watch, display: Display) -> None:
        sending = asyncio.create_task(traffic.run(phase))
        try:
            while not sending.done():
                self._children.check()
                await watch.poll()
                display.refresh(watch)
                await asyncio.wait([sending], timeout=POLL_SECONDS)
            await sending
        except DemoError:
            await asyncio.sleep(0.5)
            self._children.check()  # A program's death says more than the request that it broke.
            raise
        finally:
            sending.cancel()
            watch.end()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


DRAFTERS = {
    "ngram": "n-gram lookup in prompt and output (it pays only where the text repeats itself)",
    "eagle": "an EAGLE head on the target's hidden states",
    "ngram+eagle": "n-gram lookup where the text repeats itself, else an EAGLE head",
    "model": "a draft model",
    "none": "none, plain decoding",
}


async def is_ready(client: httpx.AsyncClient) -> bool:
    """Ask `/readyz`."""
    try:
        return (await client.get("/readyz")).status_code == 200
    except httpx.TransportError:
        return False


def choose_addresses(worker_config: Path, controller_config: Path) -> Addresses:
    """Take the configured ports where they are free, else others, and say so.

    Raises:
        DemoError: a configuration is not valid.
    """
    loaded = _load(load_worker_config, worker_config)
    steering = _load(load_controller_config, controller_config)
    worker, controller = loaded.server, steering.server
    taken: set[int] = set()
    notes = []

    def choose(what: str, host: str, wanted: int) -> int:
        port = port_or_free(host, wanted, taken)
        if port != wanted and wanted:
            notes.append(f"Port {wanted} ({what}) is taken; using {port}.")
        return port

    try:
        api_key, control_token = read_api_key(worker), read_control_tokens(worker).change
        controller_token = read_tokens(controller).change
    except (WorkerAccessError, ControllerAccessError) as error:
        raise DemoError(str(error)) from error

    port = choose("worker", worker.host, worker.port)
    control_port = choose("worker control", worker.control_host, worker.control_port)
    controller_port = choose("controller", controller.host, controller.port)
    control_url = url(worker.control_host, control_port)
    environment = {"SPEC_CONTROLLER_SERVER__PORT": str(controller_port)}
    if control_url not in [known.url for known in steering.workers]:
        only = {"id": "local", "url": control_url, "token_file": worker.control_token_file}
        environment["SPEC_CONTROLLER_WORKERS"] = json.dumps([only], default=str)
        if steering.workers:
            notes.append("The controller is told of the worker that is started here alone, as `local`.")
    if controller_port != controller.port and controller.port and JOURNAL_PATH not in os.environ:
        environment[JOURNAL_PATH] = ":memory:"  # who has the port may well have the file too
        notes.append("The journal is kept in memory.")
    head = head_of_the_default_model(loaded, worker_config)
    if head:
        notes.append("Its head drafts for the default model (SPEC_WORKER_SPEC__DRAFTER=ngram: lookup alone).")
    return Addresses(
        worker=Endpoint(url(worker.host, port), api_key),
        worker_control=Endpoint(control_url, control_token),
        controller=Endpoint(url(controller.host, controller_port), controller_token),
        worker_environment={
            "SPEC_WORKER_SERVER__PORT": str(port),
            "SPEC_WORKER_SERVER__CONTROL_PORT": str(control_port),
            **head,
        },
        controller_environment=environment,
        notes=notes,
    )


def head_of_the_default_model(config: WorkerConfig, file: Path) -> dict[str, str]:
    """Return what adds the head that comes with the default model to lookup.

    That is for the configuration that comes with the project; a person's own file is followed as it is.
    """
    is_shipped = file.resolve() == CONFIGS / "worker.toml"
    is_usual = is_shipped and config.model.path == "default" and config.spec.drafter == "ngram"
    if not is_usual or "SPEC_WORKER_SPEC__DRAFTER" in os.environ or not HEAD.is_dir():
        return {}
    return {"SPEC_WORKER_SPEC__DRAFTER": "ngram+eagle", "SPEC_WORKER_SPEC__DRAFT_MODEL_PATH": str(HEAD)}


def _load(load: Callable[[Path], Any], path: Path) -> Any:
    if not path.is_file():
        raise DemoError(f"{path}: not there, or no file")
    try:
        return load(path)
    except (OSError, ValueError) as error:  # pydantic's and tomllib's errors are ValueErrors.
        raise DemoError(f"{path}: {error}") from error


def url(host: str, port: int) -> str:
    """Return the base URL under which a listener on `host` is reached from this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
