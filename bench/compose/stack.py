"""One compose project of the check's own: name, ports, tokens and volumes that no other stack uses.

Everything goes through the docker command line, so DOCKER_HOST, contexts and COMPOSE_FILE hold as for a person.
Standard library only: it runs before anything is installed.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "slipstream-check"
TAG = "check"
PORTS = ("WORKER", "CONTROLLER", "PROMETHEUS", "GRAFANA")
KILL = "import os, sys; os.kill(int(sys.argv[1]), 9)"
T = TypeVar("T")


class CheckFailed(Exception):
    """The deployment does not do what it should."""


class Stack:
    """The project's containers, and what docker tells about them."""

    def __init__(self, secrets: Path) -> None:
        """Choose free ports; nothing is started.

        Args:
            secrets: directory that `draw_secrets` fills.
        """
        self.secrets = secrets
        self.ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
        self._environment = os.environ | {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "SLIPSTREAM_TAG": TAG,
            "SLIPSTREAM_SECRETS_DIR": str(secrets),
            **{f"SLIPSTREAM_{name}_PORT": str(port) for name, port in self.ports.items()},
        }
        self._environment.pop("SLIPSTREAM_BIND", None)  # what is checked is the default

    def url(self, name: str) -> str:
        """Return the published address of WORKER, CONTROLLER, PROMETHEUS or GRAFANA."""
        return f"http://127.0.0.1:{self.ports[name]}"

    def draw_secrets(self) -> str:
        """Draw what is missing, as `make up` does; return what the script said."""
        return self._run("docker/make-secrets.sh", str(self.secrets))

    def compose(self, *arguments: str, timeout: float = 120, is_shown: bool = False) -> str:
        """Run `docker compose`; return its stdout, or nothing where it is shown."""
        return self._run("docker", "compose", *arguments, timeout=timeout, is_shown=is_shown)

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what `docker inspect` says about a service's container."""
        identifier = self.compose("ps", "--all", "--quiet", service).strip()
        if not identifier:
            raise CheckFailed(f"{service} has no container")
        found: dict[str, Any] = json.loads(self._run("docker", "inspect", identifier))[0]
        return found

    def health(self, service: str) -> str:
        """Return starting, healthy, unhealthy, or what else the container is at."""
        state = self.inspect(service)["State"]
        return str(state["Health"]["Status"] if state["Status"] == "running" else state["Status"])

    def kill(self, service: str) -> None:
        """Kill the container's first process with SIGKILL by its pid on the engine's host.

        `docker kill` would count as a stop by hand, after which the restart policy does nothing. The signal comes from
        a container in the host's pid namespace: it is on the right machine and allowed to, wherever the engine runs.
        """
        pid = self.inspect(service)["State"]["Pid"]
        self._run(
            "docker", "run", "--rm", "--pid=host", "--network=none", "--user=0", "--cap-drop=ALL", "--cap-add=KILL",
            "--no-healthcheck", "--entrypoint=python", f"slipstream-controller:{TAG}", "-c", KILL, str(pid),
        )  # fmt: skip

    def exec_python(self, service: str, script: str) -> str:
        """Run a script with the Python of a running container, as its own user."""
        return self.compose("exec", "-T", service, "python", "-c", script)

    def remains(self) -> list[str]:
        """Return containers, volumes and networks of the project that are still there."""
        label = f"label=com.docker.compose.project={PROJECT}"
        found = []
        for kind, name in (("ps --all", "Names"), ("volume ls", "Name"), ("network ls", "Name")):
            answer = self._run(
                "docker", *kind.split(), "--filter", label, "--format", "{{." + name + "}}", timeout=60
            )
            found += answer.split()
        return found

    def logs(self) -> str:
        """Return the last lines of every container."""
        return self.compose("logs", "--no-color", "--tail=40")

    def down(self) -> None:
        """Remove containers, networks and volumes of the project; images stay."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "20", timeout=180)

    def _run(self, *command: str, timeout: float = 120, is_shown: bool = False) -> str:
        try:
            result = subprocess.run(
                command, cwd=ROOT, env=self._environment, timeout=timeout, text=True,
                stdin=subprocess.DEVNULL, stdout=sys.stderr if is_shown else subprocess.PIPE,
                stderr=None if is_shown else subprocess.PIPE,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"`{' '.join(command[:6])}` took more than {timeout:g} s") from None
        if result.returncode:
            said = "" if is_shown else f": {(result.stderr or result.stdout).strip()[-2000:]}"
            raise CheckFailed(f"`{' '.join(command[:6])}` ended with {result.returncode}{said}")
        return result.stdout or ""


def expect(is_so: bool, otherwise: str) -> None:
    """Raise CheckFailed unless something is so."""
    if not is_so:
        raise CheckFailed(otherwise)


def engine_problem() -> str | None:
    """Return why nothing can be checked here, None where an engine and compose answer."""
    for command in (
        ["docker", "version", "--format", "{{.Server.Version}}"],
        ["docker", "compose", "version"],
    ):
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except FileNotFoundError:
            return "the docker command is not installed"
        except subprocess.TimeoutExpired:
            return f"`{' '.join(command)}` does not answer"
        if result.returncode:
            return f"`{' '.join(command)}`: {result.stderr.strip() or result.stdout.strip()}"
    return None


def until(what: str, probe: Callable[[], T | None], timeout: float = 60, every: float = 0.5) -> T:
    """Return the probe's first true answer; errors of the connection count as none yet.

    Raises:
        CheckFailed: none came in time; the message has the last answer or error.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            answer = probe()
            last: object = answer
            if answer:
                return answer
        except (OSError, ValueError, KeyError) as error:
            last = error
        if time.monotonic() > deadline:
            raise CheckFailed(f"not within {timeout:g} s: {what} (last: {last!r})")
        time.sleep(every)


def _free_ports(count: int) -> list[int]:
    """Return loopback ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [int(bound.getsockname()[1]) for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()
