"""The HTTP that the check speaks: JSON in and out, statuses as values, no proxy, standard library only."""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Answer(NamedTuple):
    """Status and body; the body is None where it is no JSON."""

    status: int
    body: Any


def call(
    method: str, url: str, body: Any = None, *, token: str | None = None, timeout: float = 120
) -> Answer:
    """Send one request. OSError: no answer came."""
    try:
        with _OPENER.open(_request(method, url, body, token), timeout=timeout) as response:
            return Answer(response.status, _decode(response.read()))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _decode(error.read()))
    except http.client.HTTPException as error:
        raise ConnectionError(f"{url}: {error!r}") from error


def stream(url: str, body: Any, *, timeout: float = 120) -> Iterator[str]:
    """Yield the data of server-sent events until the stream ends. OSError: it broke off."""
    try:
        with _OPENER.open(_request("POST", url, body, None), timeout=timeout) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()
    except http.client.HTTPException as error:
        raise ConnectionError(f"{url}: {error!r}") from error


def query(prometheus: str, expression: str) -> float | None:
    """Return a PromQL expression's one value now, None where it has none."""
    answer = call("GET", f"{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
    if answer.status != 200:
        raise ValueError(f"{expression}: {answer}")
    result = answer.body["data"]["result"]
    return float(result[0]["value"][1]) if result else None


def _request(method: str, url: str, body: Any, token: str | None) -> urllib.request.Request:
    headers = {"accept": "application/json"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["content-type"] = "application/json"
    return urllib.request.Request(url, data=data, headers=headers, method=method)


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None
