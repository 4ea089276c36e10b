"""What a deployment must do, in order: each step finds out one thing and says so in a line, or raises CheckFailed."""

import json
import stat
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from bench.compose.client import call, query, stream
from bench.compose.questions import BACKUP, CONTROL, PROFILES, chat
from bench.compose.stack import CheckFailed, Stack, expect, until

SERVICES = ("worker", "controller", "prometheus", "grafana")
PUBLISHED = {
    "worker": {"8100/tcp"},
    "controller": {"8200/tcp"},
    "prometheus": {"9090/tcp"},
    "grafana": {"3000/tcp"},
}
BUILD_SECONDS = 3600.0
BACK_SECONDS = 300.0
"""For a killed service: what it needs is on its volume already."""
LONG_TOKENS = 400
REQUESTS_AFTER_CRASH = 40


class Check:
    """The steps, and what one leaves for the next."""

    def __init__(self, stack: Stack, start_seconds: float) -> None:
        """Prepare.

        Args:
            stack: where everything happens.
            start_seconds: how long the first start may take: the model's download, conversion and profile.
        """
        self.stack = stack
        self.start_seconds = start_seconds
        self.worker, self.controller, self.prometheus, self.grafana = (
            stack.url(name) for name in ("WORKER", "CONTROLLER", "PROMETHEUS", "GRAFANA")
        )
        self.depth_url = f"{self.controller}/v1/workers/worker/depth"
        self.services = list(SERVICES)
        """What is checked; without Grafana where its image cannot be had."""
        self.tokens = 0
        self.pinned = 0

    def steps(self) -> list[Callable[[], str]]:
        """Return the steps; each returns what it found."""
        return [
            self.tokens_are_private, self.images_build, self.grafana_can_be_had,
            self.controller_holds_without_a_worker,
            self.everything_becomes_healthy, self.nothing_is_open_that_should_not, self.a_request_is_answered,
            self.prometheus_has_seen_it, self.grafana_shows_it, self.the_depth_changes_over_http,
            self.the_controller_comes_back, self.the_worker_comes_back,
            self.the_journal_can_be_backed_up, self.nothing_stays,
        ]  # fmt: skip

    def token(self, name: str) -> str:
        """Return one of the drawn tokens."""
        return (self.stack.secrets / name).read_text().strip()

    def tokens_are_private(self) -> str:
        """Secret files are drawn once, with mode 600."""
        self.stack.draw_secrets()
        drawn = {path.name: path.read_text() for path in self.stack.secrets.iterdir()}
        expect(len(set(drawn.values())) == 4, f"four different tokens, got {sorted(drawn)}")
        for path in self.stack.secrets.iterdir():
            mode = stat.S_IMODE(path.stat().st_mode)
            expect(mode == 0o600, f"{path.name} has mode {mode:o}")
        self.stack.draw_secrets()
        expect(drawn == {p.name: p.read_text() for p in self.stack.secrets.iterdir()}, "drawn tokens changed")
        return f"{', '.join(sorted(drawn))}: mode 600, kept by a second run"

    def images_build(self) -> str:
        """Both images build."""
        self.stack.compose("build", timeout=BUILD_SECONDS, is_shown=True)
        return "slipstream-controller, slipstream-worker"

    def grafana_can_be_had(self) -> str:
        """Without its image (an engine without the hub) everything else is checked, and this is said."""
        try:
            self.stack.compose("pull", "--quiet", "--policy", "missing", "grafana", timeout=600)
        except CheckFailed as error:
            self.services.remove("grafana")
            return f"NO: left out and not checked ({str(error)[-200:]})"
        return "its image is here"

    def controller_holds_without_a_worker(self) -> str:
        """Controller and Prometheus start first: no crash loop, and it says what it misses."""
        self.stack.compose(
            "up", "--detach", "--no-build", "controller", "prometheus", timeout=300, is_shown=True
        )
        until("the controller is healthy", lambda: self.stack.health("controller") == "healthy", BACK_SECONDS)

        def complaint() -> Any:
            (worker,) = self._read("/v1/workers")["workers"]
            return not worker["reachable"] and worker["last_error"]

        said = until("the controller misses its worker", complaint)
        restarts = self.stack.inspect("controller")["RestartCount"]
        expect(restarts == 0, f"the controller restarted {restarts} times")
        return f"controller healthy, worker: {said}"

    def everything_becomes_healthy(self) -> str:
        """`up --wait` succeeds: no start period is too short."""
        seconds = self.start_seconds
        self.stack.compose(
            "up", "--detach", "--no-build", "--wait", "--wait-timeout", str(int(seconds)),
            *self.services, timeout=seconds + 120, is_shown=True,
        )  # fmt: skip
        states = {service: self.stack.health(service) for service in self.services}
        expect(set(states.values()) == {"healthy"}, f"{states}")
        until("the controller reaches the worker", lambda: self._worker_view()["reachable"])
        return ", ".join(f"{service} {state}" for service, state in states.items())

    def nothing_is_open_that_should_not(self) -> str:
        """Loopback only, control port not at all, no root, nothing to write on."""
        for service in self.services:
            found = self.stack.inspect(service)
            bound = {port: hosts for port, hosts in found["NetworkSettings"]["Ports"].items() if hosts}
            expect(set(bound) == PUBLISHED[service], f"{service} publishes {sorted(bound)}")
            addresses = {host["HostIp"] for hosts in bound.values() for host in hosts}
            expect(addresses == {"127.0.0.1"}, f"{service} is published on {addresses}")
            expect(found["Config"]["User"].split(":")[0] not in ("", "0", "root"), f"{service} runs as root")
            expect(found["HostConfig"]["ReadonlyRootfs"], f"{service} can write to its root")
        status = call("GET", f"{self.worker}/v1/spec/plan").status
        expect(status == 404, f"the inference port answers {status} on a control path")
        return f"{len(self.services)} ports on 127.0.0.1, none for control; no root, read-only roots"

    def a_request_is_answered(self) -> str:
        """A chat completion through the published port."""
        answer = call("POST", f"{self.worker}/v1/chat/completions", chat(24))
        expect(answer.status == 200, f"{answer}")
        self.tokens = answer.body["usage"]["completion_tokens"]
        expect(self.tokens > 0, f"{answer}")
        return f"{self.tokens} tokens"

    def prometheus_has_seen_it(self) -> str:
        """Both programs are scraped, the controller with its read token; the request's tokens are counted."""

        def value(expression: str) -> float | None:
            return query(self.prometheus, expression)

        for job in ("worker", "controller"):
            until(f"Prometheus scrapes the {job}", lambda job=job: value(f'up{{job="{job}"}}') == 1)  # type: ignore[misc]
        counted = "sum(spec_generated_tokens_total)"
        until("Prometheus has the request's tokens", lambda: (value(counted) or 0) >= self.tokens)
        up = until("the controller's view", lambda: value("spec_controller_worker_up"))
        return f"spec_generated_tokens_total {value(counted):g}, spec_controller_worker_up {up:g}"

    def grafana_shows_it(self) -> str:
        """The dashboards are there without a login, their data source answers, and nobody can change anything."""
        if "grafana" not in self.services:
            return "left out"
        found = call("GET", f"{self.grafana}/api/search?tag=slipstream")
        expect(found.status == 200 and len(found.body) == 4, f"four dashboards, got {found}")
        source = f"{self.grafana}/api/datasources/proxy/uid/prometheus/api/v1/query?query=up"
        answer = call("GET", source)
        expect(answer.status == 200 and answer.body["data"]["result"], f"the data source answers {answer}")
        status = call("POST", f"{self.grafana}/api/folders", {"title": "x"}).status
        expect(status in (401, 403), f"a stranger may make a folder: {status}")
        return ", ".join(sorted(item["title"] for item in found.body))

    def the_depth_changes_over_http(self) -> str:
        """401, 403, then a pin that the worker follows and Prometheus sees executed."""
        self.pinned = max(self._read("/v1/workers/worker/depth")["tiers"])
        body = {"num_steps": self.pinned, "ttl_seconds": 3600, "reason": "check-compose"}
        executed = f'sum(spec_rounds_total{{num_steps="{self.pinned}"}}) or vector(0)'
        before = query(self.prometheus, executed) or 0
        refused = [
            call("GET", self.depth_url).status,
            call("PUT", self.depth_url, body).status,
            call("PUT", self.depth_url, body, token=self.token("api_read_token")).status,
        ]
        expect(refused == [401, 401, 403], f"reading and changing without the right token: {refused}")
        answer = call("PUT", self.depth_url, body, token=self.token("api_token"))
        expect(answer.status in (200, 202), f"{answer}")
        self._follows_the_pin()
        call("POST", f"{self.worker}/v1/chat/completions", chat(24))
        until("rounds at the pinned depth", lambda: (query(self.prometheus, executed) or 0) > before)
        return f"401, 401, 403, then {answer.status}: rounds run at num_steps {self.pinned}"

    def the_controller_comes_back(self) -> str:
        """SIGKILL: streams go on; journal, pin and a higher epoch after the restart."""
        first = self._read("/v1/decisions?limit=1")["decisions"][0]
        epoch = self._control()["plan"]["plan"]["controller_epoch"]
        with self._long_stream() as running:
            self._crash("controller")
            expect(running.result()[-1] == "[DONE]", "the stream did not end as it should")
        self._follows_the_pin()
        again = self._read("/v1/decisions?limit=1")["decisions"][0]
        expect(first == again, f"the journal began with {first}, now with {again}")
        later = until(
            "a plan of the new controller",
            lambda: (e := self._control()["plan"]["plan"]["controller_epoch"]) > epoch and e,
        )
        return f"the stream went on; same journal, same pin, epoch {epoch} → {later}"

    def the_worker_comes_back(self) -> str:
        """SIGKILL under load: met again with a new boot_id, the pin in force, every later request answered."""
        boot_id, profiles = self._control()["boot_id"], self.stack.exec_python("worker", PROFILES)
        expect("json" in profiles, "no profile is kept on the worker's volume")
        with self._long_stream() as running:
            self._crash("worker")
            expect(
                running.exception() is not None or running.result()[-1] != "[DONE]",
                "the stream outlived its worker",
            )
        fresh = self._control()["boot_id"]
        expect(fresh != boot_id, "the boot_id stayed the same")
        until("the controller meets the new process", lambda: self._worker_view()["boot_id"] == fresh)
        self._follows_the_pin()
        with ThreadPoolExecutor(4) as pool:
            url = f"{self.worker}/v1/chat/completions"
            statuses = list(
                pool.map(lambda _: call("POST", url, chat(4)).status, range(REQUESTS_AFTER_CRASH))
            )
        expect(statuses == [200] * REQUESTS_AFTER_CRASH, f"requests after the crash: {statuses}")
        expect(self.stack.exec_python("worker", PROFILES) == profiles, "the profile was measured again")
        answer = call("DELETE", self.depth_url, token=self.token("api_token"))
        expect(answer.status in (200, 202), f"{answer}")
        return f"new boot_id, pin in force, {len(statuses)} requests answered, profile kept"

    def the_journal_can_be_backed_up(self) -> str:
        """The runbook's command, while the controller runs."""
        said = self.stack.exec_python("controller", BACKUP).strip()
        expect(said == "ok", f"integrity_check: {said}")
        target = self.stack.secrets / "backup.sqlite3"
        self.stack.compose("cp", "controller:/data/backup.sqlite3", str(target))
        size = target.stat().st_size
        target.unlink()
        return f"{size} bytes, integrity ok"

    def nothing_stays(self) -> str:
        """`down --volumes` leaves no container, volume or network."""
        self.stack.down()
        remains = self.stack.remains()
        expect(not remains, f"still there: {remains}")
        return "no container, volume or network is left"

    def _read(self, path: str) -> Any:
        answer = call("GET", f"{self.controller}{path}", token=self.token("api_read_token"), timeout=20)
        expect(answer.status == 200, f"GET {path}: {answer}")
        return answer.body

    def _worker_view(self) -> Any:
        return self._read("/v1/workers/worker")

    def _control(self) -> Any:
        return json.loads(self.stack.exec_python("worker", CONTROL))

    def _follows_the_pin(self) -> None:
        def follows() -> bool:
            depth = self._read("/v1/workers/worker/depth")
            return bool(depth["source"] == "pin" and depth["effective"] == self.pinned)

        until(f"the worker follows the pin at {self.pinned}", follows)

    def _crash(self, service: str) -> None:
        """Kill, and wait until the engine's restart policy has it back and healthy."""
        before = self.stack.inspect(service)
        self.stack.kill(service)

        def is_back() -> bool:
            now = self.stack.inspect(service)
            return now["RestartCount"] > before["RestartCount"] and self.stack.health(service) == "healthy"

        until(f"{service} comes back", is_back, BACK_SECONDS)
        after = self.stack.inspect(service)
        expect(
            before["Id"] == after["Id"] and before["State"]["Pid"] != after["State"]["Pid"], "not restarted"
        )

    @contextmanager
    def _long_stream(self) -> Iterator["Future[list[str]]"]:
        """Run a long stream beside the block, which begins after its first token."""
        events: list[str] = []

        def read() -> list[str]:
            body = chat(LONG_TOKENS) | {"stream": True, "min_tokens": LONG_TOKENS}
            for event in stream(f"{self.worker}/v1/chat/completions", body):
                events.append(event)
            return events

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(read)
            until("the stream's first token", lambda: len(events) > 1 or running.done())
            expect(not running.done(), f"the stream ended at once: {events[-1:]}")
            yield running


def run(check: Check) -> None:
    """Run every step in order; the first that fails ends it."""
    for step in check.steps():
        title = step.__name__.replace("_", " ")
        print(f"     … {title}", file=sys.stderr, flush=True)
        print(f"ok   {title}: {step()}", flush=True)
