"""Start a worker with the default model, let every client loose on it with a few requests, say what came out.

    python -m bench.clients --environments build/clients        # what `make check-clients` runs
    python -m bench.clients --only aiperf --only sglang

Each client is its own program in an environment of its own. Exit status 0 if none had an error.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.clients import sglang_load
from bench.demo.processes import Children, DemoError, port_or_free

TEXTS = Path(__file__).resolve().parents[1] / "texts"
READY_SECONDS = 600.0
CLIENT_SECONDS = 900.0
REQUESTS, STREAMS, OUTPUT_TOKENS = 8, 2, 48


class ClientFailed(Exception):
    """A client had an error; the message is for a person."""


@dataclass(frozen=True)
class Stage:
    """What every client needs to know."""

    url: str
    model: str
    tokenizer: Path
    environments: Path
    scratch: Path

    def run(self, command: list[str], **environment: str) -> str:
        """Run a client to its end; return what it printed (ClientFailed when it fails)."""
        print("$ " + " ".join(command), flush=True)
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=CLIENT_SECONDS,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "140", **environment},
            cwd=self.scratch,
        )
        print(result.stdout, flush=True)
        if result.returncode:
            raise ClientFailed(f"ended with status {result.returncode}")
        return result.stdout

    def prompts(self, field: str) -> str:
        """Write the prompts as JSONL under one field name; return the path."""
        path = self.scratch / f"{field}.jsonl"
        names = ("predictable.jsonl", "chat.jsonl")
        lines = [json.loads(line) for name in names for line in (TEXTS / name).read_text().splitlines()]
        # Alternating, so that a few of them are of both kinds.
        half = len(lines) // 2
        mixed = [line for pair in zip(lines[:half], lines[half:], strict=False) for line in pair]
        path.write_text("".join(json.dumps({field: line["text"]}) + "\n" for line in mixed[:REQUESTS]))
        return str(path)


def run_openai(stage: Stage) -> str:
    """Run the official client: sync, async, streaming, both APIs, errors."""
    script = Path(__file__).with_name("openai_client.py")
    output = stage.run(
        [str(stage.environments / "openai/bin/python"), str(script), f"{stage.url}/v1", stage.model]
    )
    return output.strip().splitlines()[-1]


def run_aiperf(stage: Stage) -> str:
    """Run AIPerf with streaming chat; its Spec Decode section must be there."""
    output = stage.run(
        [
            str(stage.environments / "aiperf/bin/aiperf"), "profile", "--model", stage.model, "--url", stage.url,
            "--endpoint-type", "chat", "--streaming", "--tokenizer", str(stage.tokenizer),
            "--input-file", stage.prompts("text"), "--custom-dataset-type", "single_turn",
            "--request-count", str(REQUESTS), "--concurrency", str(STREAMS), "--use-server-token-count",
            "--extra-inputs", "temperature:0", "--extra-inputs", f"max_tokens:{OUTPUT_TOKENS}",
            "--extra-inputs", "per_request_spec_decode_metrics:summary",
            "--ui", "none", "--no-gpu-telemetry",
        ]
    )  # fmt: skip
    section = output.partition("LLM Metrics: Spec Decode")[2]
    length = re.search(r"Acceptance Length \(ratio\)\D+([\d.]+)", section)
    if length is None:
        raise ClientFailed("AIPerf shows no Spec Decode section")
    if f"Processed {REQUESTS} valid requests and 0 errors" not in output:
        raise ClientFailed("AIPerf counted errors")
    return f"{REQUESTS} requests, no errors; its Spec Decode section says acceptance length {length[1]}"


def run_guidellm(stage: Stage) -> str:
    """Run GuideLLM with concurrent streams; every request must complete."""
    backend = {
        "kind": "openai_http", "target": stage.url, "model": stage.model,
        "extras": {"body": {"temperature": 0, "max_tokens": OUTPUT_TOKENS}},
    }  # fmt: skip
    output = stage.run(
        [
            str(stage.environments / "guidellm/bin/guidellm"), "run", "--backend", json.dumps(backend),
            "--profile", f"kind=concurrent,streams={STREAMS}",
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--tokenizer", f"kind=huggingface_auto,model={stage.tokenizer}",
            "--data", f"kind=json_file,path={stage.prompts('prompt')}",
            "--output", "kind=console", "--disable-progress",
        ],
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    # The first table's row: strategy, start, end, seconds, warm-up, cool-down, then requests: complete, not, failed.
    row = re.search(r"^\| concurrent@.*$", output.partition("Run Summary Info")[2], re.MULTILINE)
    cells = [cell.strip() for cell in row[0].split("|")] if row else []
    if cells[7:10] != [str(REQUESTS), "0", "0"]:
        raise ClientFailed(f"GuideLLM's summary is not {REQUESTS} complete requests: {cells[7:10]}")
    return f"{REQUESTS} requests complete, none failed"


def run_sglang(stage: Stage) -> str:
    """Send the load of SGLang's adaptive benchmark."""
    phases = sglang_load.run(
        stage.url, requests=REQUESTS // 2, max_new_tokens=OUTPUT_TOKENS, concurrency=STREAMS
    )
    for phase in phases:
        print(phase, flush=True)
    errors = [error for phase in phases for error in phase.errors]
    if errors:
        raise ClientFailed(f"{len(errors)} requests failed, first: {errors[0]}")
    state = httpx.get(f"{stage.url}/server_info").json()["internal_states"][0]
    lengths = ", ".join(f"{phase.name} {phase.accept_length:.2f}" for phase in phases)
    return f"accept_length by phase: {lengths}; server's own {state['avg_spec_accept_length']:.2f}"


CLIENTS: dict[str, Callable[[Stage], str]] = {
    "openai": run_openai,
    "aiperf": run_aiperf,
    "guidellm": run_guidellm,
    "sglang": run_sglang,
}


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description=__doc__.splitlines()[0])
    parser.add_argument("--environments", type=Path, default=Path("build/clients"), metavar="DIR")
    parser.add_argument("--config", type=Path, default=Path("configs/worker.toml"), metavar="FILE")
    parser.add_argument("--only", action="append", choices=sorted(CLIENTS), help="may be repeated")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="slipstream-clients-"))
    outcomes: dict[str, tuple[bool, str]] = {}
    try:
        with Children(scratch) as children:
            stage = serve(children, options, scratch)
            for name in options.only or CLIENTS:
                print(f"\n==== {name} ====", flush=True)
                outcomes[name] = attempt(CLIENTS[name], stage)
                children.check()
    except DemoError as error:
        print(f"check-clients failed: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print("\n==== summary ====")
    for name, (is_good, text) in outcomes.items():
        print(f"{name:<10} {'ok  ' if is_good else 'FAIL'}  {text}")
    return 0 if all(is_good for is_good, _ in outcomes.values()) else 1


def attempt(client: Callable[[Stage], str], stage: Stage) -> tuple[bool, str]:
    """Run one client; return whether it went well, and what to say of it."""
    began = time.monotonic()
    try:
        text = client(stage)
    except (ClientFailed, OSError, subprocess.TimeoutExpired, httpx.HTTPError) as error:
        return False, " ".join(str(error).split())
    return True, f"{text} ({time.monotonic() - began:.0f} s)"


def serve(children: Children, options: argparse.Namespace, scratch: Path) -> Stage:
    """Start a worker on free ports and wait until it is ready (DemoError when it dies)."""
    taken: set[int] = set()
    port, control_port = (port_or_free("127.0.0.1", 0, taken) for _ in range(2))
    settings = {
        "SPEC_WORKER_SERVER__HOST": "127.0.0.1",
        "SPEC_WORKER_SERVER__PORT": str(port),
        "SPEC_WORKER_SERVER__CONTROL_PORT": str(control_port),
        "SPEC_WORKER_ENGINE__PROFILE_SECONDS": "0",
    }
    command = [str(Path(sys.executable).with_name("spec-worker")), "run", "--config", str(options.config)]
    children.start("worker", command, settings)
    url = f"http://127.0.0.1:{port}"
    print(f"loading a worker on {url}", flush=True)
    give_up = time.monotonic() + READY_SECONDS
    while True:
        children.check()
        try:
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                break
        except httpx.TransportError:
            pass
        if time.monotonic() > give_up:
            raise DemoError(f"the worker was not ready within {READY_SECONDS:g} s")
        time.sleep(0.2)
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    tokenizer = Path(httpx.get(f"{url}/model_info").json()["tokenizer_path"]).resolve()
    return Stage(url, model, tokenizer, options.environments.resolve(), scratch)


if __name__ == "__main__":
    sys.exit(main())
