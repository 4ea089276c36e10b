"""The page's files: what is vendored is what was published, everything is packaged, nothing comes from elsewhere."""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from controller.app import create_app
from controller.clock import SystemClock
from controller.config import ControllerConfig

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "controller" / "web"
VENDOR = WEB / "vendor"
MANIFEST = json.loads((VENDOR / "manifest.json").read_text())
OWN = sorted(p for p in WEB.iterdir() if p.is_file())


@pytest.fixture
def client(simulation: ModuleType) -> Iterator[TestClient]:
    config = ControllerConfig.model_validate(
        {
            "server": {"token": "a-token-to-change"},
            "journal": {"path": ":memory:"},
            "workers": [{"id": "a", "url": "http://a:1"}],
        }
    )
    worker = simulation.SimulatedWorker(simulation.VirtualClock())
    app = create_app(config, clock=SystemClock(), registry=CollectorRegistry(), clients={"a": worker})
    with TestClient(app, base_url="http://localhost") as client:
        yield client


def test_vendored_files_are_those_of_the_manifest() -> None:
    found = {
        str(path.relative_to(VENDOR)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    listed = {
        f"{name}/{file}": digest
        for name, entry in MANIFEST.items()
        for file, digest in entry["files"].items()
    }
    assert found == listed
    for name, entry in MANIFEST.items():
        assert entry["version"] and entry["licence"] in ("MIT", "BSD-3-Clause")
        licence = (VENDOR / name / entry["licence_file"]).read_text()
        assert "copyright" in licence.lower() and len(licence) > 500


def test_what_a_script_imports_is_there() -> None:
    """No bare names (they would need an import map, hence an inline script), no file that is missing."""
    for path in WEB.rglob("*.js"):
        text = path.read_text()
        for name in re.findall(r"""(?:^|[;}\s])(?:import|export)\b[^;'"]*?from\s*["']([^"']+)["']""", text):
            assert name.startswith(("./", "../")), f"{path}: {name}"
            assert (path.parent / name).resolve().is_file(), f"{path}: {name}"


@pytest.mark.parametrize("path", OWN, ids=lambda p: p.name)
def test_nothing_comes_from_elsewhere_and_nothing_is_inline(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "").replace("http://127.0.0.1:8101", "")
    assert not re.search(r"https?://|//cdn|@import", text)
    if path.suffix == ".html":
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son[a-z]+=|\sstyle=", text)
    if path.suffix == ".js":
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|unsafe|\beval\b|localStorage|document\.cookie", text
        )
        assert not re.search(r"""\sstyle=["$]""", text), (
            "a style attribute is blocked by the page's own policy"
        )
        assert len(text.splitlines()) <= 300


def test_everything_is_packaged() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "controller"
    ]
    files = [str(p.relative_to(ROOT / "controller")) for p in WEB.rglob("*") if p.is_file()]
    assert files and [f for f in files if not any(fnmatch(f, glob) for glob in globs)] == []
    assert "COPY controller ./controller" in (ROOT / "docker/controller.Dockerfile").read_text()


def test_the_page_opens_without_a_token_and_tells_nothing(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    for path in ("web/app.js", "web/style.css", "web/vendor/uplot/uPlot.esm.js", "web/icon.svg"):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert client.get(path, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    assert client.get("web/app.js").headers["content-type"].startswith("text/javascript")
    for answer in (page, client.get("web/app.js")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
    for src in re.findall(r"""(?:src|href)="(web/[^"]+)""", page.text):
        assert client.get(src).status_code == 200, src


@pytest.mark.parametrize(
    "path",
    [
        "/web/../app/access.py",
        "/web/%2e%2e/config.py",
        "/web/..%2fconfig.py",
        "/web/nothing.js",
        "/web/",
        "/web/vendor",
    ],
)
def test_nothing_else_can_be_read_that_way(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (401, 404) and "import" not in answer.text
    assert answer.headers["content-type"] == "application/problem+json"


def test_the_open_paths_are_open_for_reading_only(client: TestClient) -> None:
    for path in ("/", "/web/app.js"):
        assert client.post(path).status_code == 401
    for path in ("/v1", "/v1/events", "/web", "/webx", "/openapi.json"):
        assert client.get(path).status_code == 401, path
