"""The controller's page in a real Chromium, against a real controller and a real worker with a tiny model.

Run by `make check-page`, which puts playwright on the path and names the browser in CHROMIUM; skipped without.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome") or ""
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; see `make check-page`"
)
pytestmark = [
    pytest.mark.skipif(not BROWSER, reason="no Chromium: apt-get install chromium, or name one in CHROMIUM"),
    pytest.mark.timeout(180),
]
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
DRAWN = """[...document.querySelectorAll("canvas")].map((canvas) =>
    canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value))"""
OUTLINE = """(() => {
    const style = getComputedStyle(document.activeElement);
    return [style.outlineStyle, parseFloat(style.outlineWidth)];
})()"""
UNNAMED = """[...document.querySelectorAll("button, input, select")].filter((element) =>
    !(element.ariaLabel || element.textContent.trim() || element.labels?.length)).length"""
CHANGE, READ = "token-for-changes", "token-for-reading"
expect: Any = playwright.expect
expect.set_options(timeout=20_000)
Start = Callable[..., str]


class Program:
    """One of our two programs as a process, its log in a file."""

    def __init__(self, module: str, log: Path, environment: dict[str, str], addresses: str) -> None:
        self.log = log
        self._command = [
            sys.executable,
            "-c",
            f"import sys; from {module}.cli import main; sys.exit(main())",
            "run",
        ]
        self._environment = os.environ | environment
        self.urls: list[str] = []
        self._addresses = addresses
        self.start()

    def start(self) -> None:
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(self._command, env=self._environment, stderr=output)
        give_up = time.monotonic() + 120
        while not (found := re.findall(self._addresses, self.log.read_text())):
            assert self.process.poll() is None and time.monotonic() < give_up, self.log.read_text()
            time.sleep(0.1)
        self.urls = found

    def stop(self) -> None:
        """SIGTERM must end it by itself and soon, whatever streams are open."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log.read_text()


@pytest.fixture(scope="module")
def worker(
    tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Program]:
    environment = {
        "MODEL__PATH": str(tiny_model_dir(max_positions=2048)), "MODEL__NAME": "tiny", "MODEL__THREADS": "1",
        "MODEL__DTYPE": "float64", "MODEL__DEVICE": "cpu", "ENGINE__MAX_CONTEXT_TOKENS": "2048",
        "ENGINE__PROFILE_SECONDS": "0", "SERVER__PORT": "0", "SERVER__CONTROL_PORT": "0",
    }  # fmt: skip
    program = Program(
        "worker",
        tmp_path_factory.mktemp("worker") / "log",
        {f"SPEC_WORKER_{name}": value for name, value in environment.items()},
        r"(?:inference|control) +(http://[\d.:]+)",
    )
    give_up = time.monotonic() + 120
    while httpx.get(f"{program.urls[0]}/readyz", trust_env=False).status_code != 200:
        assert time.monotonic() < give_up, program.log.read_text()
        time.sleep(0.1)
    program.urls = re.findall(r"(?:inference|control) +(http://[\d.:]+)", program.log.read_text())
    yield program
    program.stop()


@pytest.fixture
def start(worker: Program, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """`start(token=…)` -> a controller of that worker."""
    started: list[Program] = []

    def make(workers: list[dict[str, str]] | None = None, port: int = 0, **server: str) -> Program:
        listed = [{"id": "local", "url": worker.urls[1]}] if workers is None else workers
        environment = {
            "WORKERS": json.dumps(listed), "SERVER__PORT": str(port),
            "JOURNAL__PATH": str(tmp_path / "journal.sqlite3"),
            "GUARDS__WINDOW_SECONDS": "3600",  # the policy only watches: every change is the test's
            **{f"SERVER__{name.upper()}": value for name, value in server.items()},
        }  # fmt: skip
        environment = {f"SPEC_CONTROLLER_{name}": value for name, value in environment.items()}
        started.append(Program("controller", tmp_path / "log", environment, r"listening on (http://[\d.:]+)"))
        return started[-1]

    yield make
    for program in started:
        if program.process.poll() is None:
            program.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield found
        found.close()


class Watched:
    """A page whose every request and complaint is noted."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(20_000)
        self.hosts: set[str] = set()
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console", lambda it: self.complaints.append(it.text) if it.type in ("error", "warning") else None
        )


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """`open_page(url)` -> the page; afterwards it must have asked nobody else and complained about nothing."""
    contexts: list[Any] = []
    watched: list[tuple[str, Watched, tuple[str, ...]]] = []

    def make(url: str, *, allowed: tuple[str, ...] = (), **options: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}, **options))
        watched.append((url, Watched(contexts[-1]), allowed))
        page = watched[-1][1].page
        page.goto(url)
        return page

    yield make
    for url, seen, allowed in watched:
        assert seen.hosts == {urlsplit(url).netloc}, "everything comes from the controller"
        assert [c for c in seen.complaints if not any(word in c for word in allowed)] == []
        assert seen.page.evaluate("window.hacked") is None
    for context in contexts:
        context.close()


def cell(page: Any, label: str, worker_id: str = "local") -> Any:
    row = page.locator("table.workers > tbody > tr", has=page.locator(".id", has_text=worker_id))
    return row.locator(f"td[data-label='{label}']")


def button(page: Any, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def test_a_pin_on_the_page_changes_the_worker_and_shows_as_a_decision(
    start: Callable[..., Program], worker: Program, open_page: Callable[..., Any]
) -> None:
    page = open_page(start().urls[0])
    expect(page.locator("#connection")).to_have_text("live")
    expect(cell(page, "Health")).to_have_text("up")
    expect(cell(page, "Depth")).to_contain_text("policy")
    assert spec(worker, "plan")["source"] == "plan"

    button(page, "Pin …").click()
    page.get_by_role("radio", name="5").check()
    page.get_by_label("For how long").select_option("5 minutes")
    page.get_by_label("Reason, for the record").fill("to see it change")
    button(page, "Pin").click()
    expect(page.get_by_role("status")).to_have_text("Pinned local at 5.")
    expect(cell(page, "Depth")).to_contain_text("5")
    expect(cell(page, "Depth")).to_contain_text("pin, 5 min left")
    newest = page.locator("table.decisions > tbody > tr").first
    expect(newest).to_contain_text("pinned")
    expect(newest).to_contain_text("to see it change")
    plan = spec(worker, "plan")
    assert (plan["source"], plan["num_steps"]) == ("pin", 5) and 290 < plan["pin_remaining_seconds"] <= 300
    say(worker)
    assert any(b["num_steps"] == 5 and b["rounds"] > 0 for b in spec(worker, "stats")["buckets"])

    button(page, "Release").click()
    expect(page.get_by_role("status")).to_have_text("Released local.")
    expect(cell(page, "Depth")).to_contain_text("policy")
    assert spec(worker, "plan")["source"] == "plan"
    expect(button(page, "Release")).to_be_disabled()

    button(page, "Roll back …").click()
    button(page, "Roll back").click()
    expect(cell(page, "Depth")).to_contain_text("pin, ")
    expect(cell(page, "Depth")).to_contain_text("policy held, ")
    assert spec(worker, "plan")["source"] == "pin"
    button(page, "Release").click()
    expect(button(page, "Release")).to_be_disabled()


def spec(worker: Program, what: str) -> Any:
    return httpx.get(f"{worker.urls[1]}/v1/spec/{what}", trust_env=False).raise_for_status().json()


def say(worker: Program) -> None:
    """Let the worker generate something that its drafter can look up."""
    body = {"prompt": "ab ab ab ab ab ab ab ab ", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    httpx.post(f"{worker.urls[0]}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()


def test_modes_charts_and_reasons(
    start: Callable[..., Program], worker: Program, open_page: Callable[..., Any]
) -> None:
    controller = start()
    page = open_page(controller.urls[0], allowed=("409",))
    button(page, "frozen").click()
    expect(page.get_by_role("dialog")).to_contain_text("keeps every depth as it is now")
    button(page, "Freeze").click()
    expect(cell(page, "Mode")).to_have_text("frozen")
    expect(button(page, "frozen")).to_have_attribute("aria-pressed", "true")
    button(page, "Mode of local: frozen. Change it").click()
    page.get_by_role("radio", name="advisory").check()
    button(page, "Set the mode").click()
    expect(cell(page, "Mode")).to_have_text("advisory*")
    modes = httpx.get(f"{controller.urls[0]}/v1/mode", trust_env=False).json()
    assert modes == {"mode": "frozen", "workers": {"local": "advisory"}}
    button(page, "Mode of local: advisory. Change it").click()
    page.get_by_role("radio", name="released").check()
    button(page, "Set the mode").click()
    button(page, "Pin …").click()
    button(page, "Pin").click()
    expect(page.get_by_role("alert")).to_contain_text("nothing is sent to it; set another mode first")
    button(page, "Cancel").click()
    page.get_by_label("Which decisions").select_option("operators' orders")
    rows = page.locator("table.decisions > tbody > tr")
    expect(rows).to_have_count(3)
    page.get_by_label("Which decisions").select_option("everything")

    say(worker)
    expect(cell(page, "Tokens per round")).not_to_have_text("–")
    assert page.locator("canvas").count() == 3
    assert page.evaluate(DRAWN) == [True] * 3

    button(page, "Explain").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("mode: released")
    dialog.get_by_label("At what time").fill("2001-01-01T00:00")
    button(page, "Ask").click()
    expect(dialog).to_contain_text("Nothing is known of it at that time")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_it_can_be_used_with_the_keyboard_alone(
    start: Callable[..., Program], open_page: Callable[..., Any]
) -> None:
    page = open_page(start().urls[0])
    expect(cell(page, "Depth")).to_contain_text("policy")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Pin …":
            break
    assert page.evaluate("document.activeElement.textContent") == "Pin …"
    assert page.evaluate(OUTLINE) == ["solid", 2]
    page.keyboard.press("Enter")
    expect(page.locator(":focus")).to_have_attribute(
        "name", "num_steps"
    )  # the dialog begins at its first field
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator(":focus")).to_have_text("Pin …")  # and gives the focus back
    page.keyboard.press("Enter")
    expect(page.locator(":focus")).to_have_attribute("name", "num_steps")
    page.keyboard.press("ArrowRight")
    depth = int(page.evaluate("document.querySelector('input:checked[name=num_steps]').value"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_have_text(f"Pinned local at {depth}.")
    assert page.evaluate(UNNAMED) == 0
    if depth:
        button(page, "Release").click()
        expect(cell(page, "Depth")).to_contain_text("policy")


def test_hostile_reasons_stay_text(start: Callable[..., Program], open_page: Callable[..., Any]) -> None:
    url = start().urls[0]
    page = open_page(url)
    expect(cell(page, "Depth")).to_contain_text("policy")
    answer = httpx.put(
        f"{url}/v1/workers/local/depth",
        json={"num_steps": 2, "ttl_seconds": 60, "reason": HOSTILE},
        trust_env=False,
    )
    assert answer.status_code in (200, 202)
    expect(cell(page, "Depth")).to_contain_text(HOSTILE)
    expect(page.locator("table.decisions > tbody > tr").first).to_contain_text(HOSTILE)
    button(page, "Explain").click()
    page.get_by_text("Everything on record, in words").click()
    expect(page.locator("dialog pre")).to_contain_text(HOSTILE)
    assert page.locator("img:not(h1 img), script:not(head script)").count() == 0
    httpx.delete(f"{url}/v1/workers/local/depth", trust_env=False)


def test_hostile_names_stay_text(start: Callable[..., Program], open_page: Callable[..., Any]) -> None:
    """The configuration refuses such ids; should one come through all the same, it is text like everything else."""
    url = start().urls[0]
    with httpx.stream("GET", f"{url}/v1/events", params={"recent": 10}, trust_env=False) as answer:
        text = ""
        for chunk in answer.iter_text():
            text += chunk
            if "event: workers" in text and text.endswith("\n\n") and "event: decision" in text:
                break
    as_json = json.dumps(HOSTILE)
    for name in ("local", "tiny", "met"):
        text = text.replace(f'"{name}"', as_json)

    hostile = open_page(url, allowed=("ERR_", "Failed to load"))
    hostile.route("**/v1/events*", lambda route: route.fulfill(body=text, content_type="text/event-stream"))
    hostile.reload()
    expect(hostile.locator("table.workers .id")).to_have_text(HOSTILE)
    expect(hostile.locator("table.decisions td.id").first).to_have_text(HOSTILE)
    expect(hostile.locator("figcaption .id").first).to_have_text(HOSTILE)
    button(hostile, "Pin …").click()
    expect(hostile.locator("#dialog-title")).to_contain_text(HOSTILE)
    assert hostile.locator("img:not(h1 img), script:not(head script)").count() == 0


def test_tokens(start: Callable[..., Program], open_page: Callable[..., Any]) -> None:
    url = start(token=CHANGE, read_token=READ).urls[0]
    page = open_page(url, allowed=("401", "403"))
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("wants a bearer token")

    def give(value: str) -> None:
        page.get_by_role("textbox", name="Token").fill(value)
        button(page, "Use it").click()

    give("two words")
    expect(page.get_by_role("alert")).to_contain_text("one word")
    give("a-wrong-one")
    expect(dialog).to_contain_text("not known to the controller")
    give(READ)
    expect(cell(page, "Depth")).to_contain_text("policy")
    expect(dialog).to_be_hidden()
    button(page, "Pin …").click()
    button(page, "Pin").click()
    expect(dialog).to_contain_text("this token is for reading; a change needs the other one")
    give(CHANGE)
    expect(page.locator("#connection")).to_have_text("live")
    button(page, "Pin …").click()
    button(page, "Pin").click()
    expect(page.get_by_role("status")).to_contain_text("Pinned local at")
    button(page, "Release").click()
    kept = "[Object.values(sessionStorage), localStorage.length, document.cookie, location.href]"
    assert page.evaluate(kept) == [[CHANGE], 0, "", f"{url}/"]
    button(page, "Token …").click()
    button(page, "Forget the token").click()
    expect(page.locator("#connection")).to_have_text("token needed")
    assert page.evaluate("sessionStorage.length") == 0


def test_a_controller_that_restarts_and_one_that_has_no_worker(
    start: Callable[..., Program], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    controller = start(workers=[{"id": "gone", "url": "http://127.0.0.1:9"}])
    url = controller.urls[0]
    page = open_page(url, allowed=("ERR_", "Failed to load"))
    expect(cell(page, "Health", "gone")).to_contain_text("never seen")
    expect(page.locator(".tile").first).to_contain_text("0 of 1")
    controller.stop()
    expect(page.locator("#connection")).to_have_text("not connected")
    expect(page.locator(".notice")).to_contain_text("This is how it was at")
    start(workers=[], port=urlsplit(url).port or 0)
    expect(page.locator("#connection")).to_have_text("live", timeout=40_000)
    expect(page.get_by_text("No worker is configured")).to_be_visible()
    expect(page.locator("table.decisions")).to_contain_text("gone")
