"""Log lines: their two shapes, and that no prompt and no answer is ever in one."""

import json
import logging
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from worker.config import LogConfig
from worker.logs import configure_logging

SECRET = "xyzzy-plugh"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines_carry_extras_and_exceptions(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig(format="json", level="info"))
    log = logging.getLogger("worker.test")
    log.debug("too fine")
    log.info("plan %d: %s", 3, "fünf", extra={"version": 3})
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["plan 3: fünf", "failed"]
    assert lines[0] == {
        "time": lines[0]["time"],
        "level": "info",
        "logger": "worker.test",
        "message": "plan 3: fünf",
        "version": 3,
    }
    assert "ValueError: no" in lines[1]["exception"]


def test_console_lines_are_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig(level="warning"))
    logging.getLogger("worker.test").info("not this")
    logging.getLogger("worker.test").warning("but this")
    assert capsys.readouterr().err.rstrip().endswith("WARNING worker.test: but this")


def test_no_prompt_is_logged_whatever_happens(
    client: TestClient, scripted_client: TestClient, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(LogConfig(format="json", level="debug"))
    logging.getLogger("worker.test").info("here")
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "stop": SECRET}
    for change in ({}, {"stream": True}, {"temperature": SECRET}, {"n": 2}, {"timeout_seconds": 0}):
        client.post("/v1/chat/completions", json=chat | change)
        client.post("/v1/completions", json=chat | {"prompt": SECRET} | change)
        client.post("/generate", json={"text": SECRET, "sampling_params": change})
    client.post("/generate", json={"text": SECRET * 1000})
    client.post("/generate", content=f'{{"text": "{SECRET}'.encode())
    log = capsys.readouterr().err
    assert '"here"' in log, "the capture works"
    assert SECRET not in log


def test_no_prompt_is_logged_by_a_bug(
    scripted_client: TestClient, scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(LogConfig(level="debug"))
    scripted.refuse = ZeroDivisionError("a bug")
    assert scripted_client.post("/generate", json={"text": SECRET}).status_code == 500
    log = capsys.readouterr().err
    assert "unexpected error in POST /generate" in log
    assert SECRET not in log
