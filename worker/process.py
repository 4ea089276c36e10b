"""The life of the worker process: open both listeners, load the model beside them, serve, drain, leave.

One process, one asyncio loop, two uvicorn servers; the engine has its own thread. The first SIGTERM or SIGINT drains
(new requests get 503, running ones may finish for `server.shutdown_grace_seconds`), the second leaves at once. Knows
how things start and end, not what they do.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from worker.api.served import ServedModel, ServingEngine
from worker.config import WorkerConfig
from worker.control import create_control_app
from worker.server import create_app
from worker.tokenization import Tokenizer

log = logging.getLogger(__name__)

CLOSE_SECONDS = 2
"""Time for connections to end once the engine has stopped."""


BACKLOG = 2048


class StartFailure(Exception):
    """The worker cannot serve; the message is one line for a person."""


class Loaded(NamedTuple):
    """A started engine and the tokenizer that belongs to it."""

    engine: ServingEngine
    tokenizer: Tokenizer


Loader = Callable[[WorkerConfig], Loaded]


def run(config: WorkerConfig, load: Loader) -> int:
    """Serve until a signal; return 0 after a clean stop.

    Raises:
        StartFailure: an address is taken, or the model cannot be loaded.
        worker.access.AccessError: the control listener must not be opened like this.
    """
    return asyncio.run(_serve(config, load))


async def _serve(config: WorkerConfig, load: Loader) -> int:
    model = ServedModel()
    control_app = create_control_app(model, config)
    app = create_app(model, config, registry=CollectorRegistry())
    server = config.server
    with contextlib.ExitStack() as stack:
        inference_socket = stack.enter_context(_listen("server.port", server.host, server.port))
        control_socket = stack.enter_context(
            _listen("server.control_port", server.control_host, server.control_port)
        )
        listeners = [_Listener(app, inference_socket), _Listener(control_app, control_socket)]
        stopping = asyncio.Event()
        _install_signals(stopping, server.shutdown_grace_seconds)
        serving = [asyncio.create_task(listener.serve_on_socket()) for listener in listeners]
        log.info("loading the model; %s/healthz answers already", listeners[0].url)
        loading = _load_on_thread(config, load)
        stop_asked = asyncio.create_task(stopping.wait())
        endings: list[asyncio.Future[Any]] = [stop_asked, *serving]
        try:
            await asyncio.wait([loading, *endings], return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                model.attach(*loading.result())
                _announce(model, *listeners)
                await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            if not stopping.is_set():
                raise StartFailure("a listener ended by itself; see the log")
        finally:
            await _drain(model, server.shutdown_grace_seconds, listeners, serving)
            stop_asked.cancel()
    if not loading.done():
        # The loading thread cannot be interrupted and must not run while the interpreter is taken down.
        _leave_at_once(0)
    return 0


class _Listener(uvicorn.Server):
    """One uvicorn server on a socket that is already bound; signals are the process's business."""

    def __init__(self, app: FastAPI, bound: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app, lifespan="off", log_config=None, access_log=False, server_header=False,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )  # fmt: skip
        self._bound = bound
        host, port = bound.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def serve_on_socket(self) -> None:
        """Serve until `should_exit`."""
        await self.serve(sockets=[self._bound])


def _listen(field: str, host: str, port: int) -> socket.socket:
    """Open the socket at once, before the server is ready: early connections wait instead of being refused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise StartFailure(f"{field}: cannot listen on {host}:{port}: {error.strerror or error}") from None
    return bound


def _install_signals(stopping: asyncio.Event, grace_seconds: float) -> None:
    def on_signal(number: int) -> None:
        name = signal.Signals(number).name
        if stopping.is_set():
            log.warning("%s again: leaving at once", name)
            _leave_at_once(128 + number)
        log.info("%s: draining for up to %g s; send it again to leave at once", name, grace_seconds)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _leave_at_once(status: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _load_on_thread(config: WorkerConfig, load: Loader) -> "asyncio.Future[Loaded]":
    """Load on a daemon thread: a signal need not wait for it, and its OpenMP threads end with it.

    libgomp counts the threads of all teams, idle ones too. Above the number of cores it puts threads to sleep between
    any two kernels, and then rounds take twice as long: no thread but the engine's may keep a team.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Loaded] = loop.create_future()

    def finish(loaded: Loaded | None, failure: StartFailure | None) -> None:
        if future.done():
            return
        if loaded is not None:
            future.set_result(loaded)
        else:
            future.set_exception(failure or StartFailure("the model was not loaded"))

    def work() -> None:
        loaded, failure = None, None
        try:
            loaded = load(config)
        except Exception as error:
            log.debug("loading failed", exc_info=True)
            reason = " ".join(str(error).split()) or type(error).__name__
            failure = StartFailure(f"cannot load the model: {reason}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, loaded, failure)

    threading.Thread(target=work, name="load-model", daemon=True).start()
    return future


def _announce(model: ServedModel, inference: _Listener, control: _Listener) -> None:
    info = model.engine.info
    log.info(
        "ready: %s on %s (%s), drafter %s, num_steps %s of %s",
        info.model, info.device, info.dtype, info.drafter, info.fallback_num_steps, info.candidate_steps,
    )  # fmt: skip
    log.info(
        "inference  %s/v1/chat/completions  /v1/completions  /generate  /v1/models  /metrics  /readyz",
        inference.url,
    )
    log.info("control    %s/v1/spec/info  /v1/spec/stats  /v1/spec/plan", control.url)


async def _drain(
    model: ServedModel,
    grace_seconds: float,
    listeners: list[_Listener],
    serving: list["asyncio.Task[None]"],
) -> None:
    """Stop the engine while the listeners still deliver what it hands out, then close them."""
    if model.is_attached:
        await asyncio.to_thread(model.engine.shutdown, grace_seconds)
    for listener in listeners:
        listener.should_exit = True
    for outcome in await asyncio.gather(*serving, return_exceptions=True):
        if isinstance(outcome, BaseException):
            log.error("a listener ended with %r", outcome)
    log.info("stopped")
