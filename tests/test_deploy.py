"""Deployment files keep their promises: loopback only, health checks, no GPU by default, a controller without torch."""

import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from controller.config import load_config as load_controller_config
from worker.config import load_config as load_worker_config

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
GPU = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
SERVICES = COMPOSE["services"]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def test_every_published_port_is_on_loopback() -> None:
    published = {name: service.get("ports", []) for name, service in SERVICES.items()}
    assert {name for name, ports in published.items() if ports} == {"worker", "controller", "prometheus"}
    for ports in published.values():
        assert all(port.startswith("127.0.0.1:") for port in ports)
    assert not any("ports" in service for service in GPU["services"].values())


def test_the_control_port_is_not_published_and_needs_a_token() -> None:
    assert [port.rsplit(":", 1)[1] for port in SERVICES["worker"]["ports"]] == ["8100"]
    token = SERVICES["worker"]["environment"]["SPEC_WORKER_SERVER__CONTROL_TOKEN_FILE"]
    assert token == "/run/control/token"
    for name in ("worker", "controller"):
        assert "control-token:/run/control:ro" in SERVICES[name]["volumes"]
        assert SERVICES[name]["depends_on"]["control-token"] == {
            "condition": "service_completed_successfully"
        }


def test_the_gpu_is_only_in_the_override() -> None:
    assert not any("deploy" in service or "runtime" in service for service in SERVICES.values())
    worker = GPU["services"]["worker"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert list(GPU["services"]) == ["worker"]


@pytest.mark.parametrize("name", ["worker", "controller", "prometheus"])
def test_services_have_health_checks_and_come_back(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD" and "ready" in check["test"][-1]
    assert SERVICES[name]["restart"] == "unless-stopped"
    assert int(check["start_period"].removesuffix("s")) >= (600 if name == "worker" else 20)


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_services_run_hardened(name: str) -> None:
    assert SERVICES[name]["read_only"] is True
    assert SERVICES[name]["cap_drop"] == ["ALL"]
    assert SERVICES[name]["security_opt"] == ["no-new-privileges:true"]


def test_mounted_files_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"], (
                volume
            )


def test_prometheus_scrapes_the_services_on_their_configured_ports() -> None:
    config = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    worker = load_worker_config(ROOT / "configs/worker.compose.toml").server
    controller = load_controller_config(ROOT / "configs/controller.compose.toml")
    assert targets["worker"] == [f"worker:{worker.port}"] and worker.host == "0.0.0.0"
    assert (
        targets["controller"] == [f"controller:{controller.server.port}"]
        and controller.server.host == "0.0.0.0"
    )
    (listed,) = controller.workers
    assert listed.url == f"http://worker:{worker.control_port}"
    assert (
        str(listed.token_file) == SERVICES["worker"]["environment"]["SPEC_WORKER_SERVER__CONTROL_TOKEN_FILE"]
    )


def test_environment_variables_name_real_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in (SERVICES["worker"], GPU["services"]["worker"]):
        for name, value in service["environment"].items():
            if name.startswith("SPEC_WORKER_"):
                monkeypatch.setenv(name, value)
    config = load_worker_config(ROOT / "configs/worker.compose.toml")
    assert config.model.device == "cuda"
    assert config.server.control_token_file == Path("/run/control/token")


def test_the_token_is_drawn_once_and_private(tmp_path: Path) -> None:
    *python, script = SERVICES["control-token"]["entrypoint"]
    assert python == ["python", "-c"]
    script = script.replace("/run/control", str(tmp_path))

    def draw() -> str:
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
        return (tmp_path / "token").read_text()

    first = draw()
    assert re.fullmatch(r"[A-Za-z0-9_-]{32,}", first)
    assert draw() == first
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_pinned_and_run_as_nobody_special(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"^ARG PYTHON_TAG=3\.11\.\d+-slim", text, re.M)
    assert re.findall(r"^FROM (\S+)", text, re.M) == ["python:${PYTHON_TAG}"] * 2
    assert re.search(r"^USER [1-9]\d*$", text, re.M)
    assert "HEALTHCHECK" in text and "curl" not in text and "syntax=" not in text
    for argument in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        assert re.search(rf"^ARG {argument}=$", text, re.M), argument


def test_only_the_worker_image_installs_torch() -> None:
    assert "torch" in (ROOT / "docker/worker.Dockerfile").read_text()
    instructions = re.sub(r"^#.*$", "", (ROOT / "docker/controller.Dockerfile").read_text(), flags=re.M)
    assert "torch" not in instructions and "[worker]" not in instructions


def test_the_controller_runs_where_the_workers_extra_is_missing() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["worker"]
    names = [re.split(r"[^A-Za-z0-9_-]", line)[0].replace("-", "_") for line in extra]
    assert "torch" in names
    script = (
        f"import sys\nfor name in {names}: sys.modules[name] = None\n"
        "import controller.cli, controller.loop\n"
        "worker = sorted(name for name in sys.modules if name.startswith('worker.'))\n"
        "assert worker == ['worker.protocol'], worker\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text().split()
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.!+]+", line) for line in lines)
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    assert {re.split(r"[^A-Za-z0-9_-]", line)[0] for line in wanted} <= pinned
    assert "torch==2.13.0" in lines


def test_the_build_context_holds_what_the_images_copy() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for path in DOCKERFILES:
        for line in re.findall(r"^COPY (?!--from)(.+)$", path.read_text(), re.M):
            assert set(line.split()[:-1]) <= allowed, path.name


@pytest.mark.parametrize("override", [[], ["-f", "docker-compose.gpu.yml"]], ids=["cpu", "gpu"])
def test_docker_compose_accepts_the_files(override: list[str]) -> None:
    docker = shutil.which("docker")
    if not docker or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed")
    command = [docker, "compose", "-f", "docker-compose.yml", *override, "config", "-q"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_the_readme_names_what_there_is() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M)) - targets == set()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / link).exists(), link
    for name in re.findall(r"`((?:worker|controller|bench|docs|configs)/[a-z0-9_/.-]+)`", text):
        assert (ROOT / name).exists(), name
