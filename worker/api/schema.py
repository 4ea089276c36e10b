"""The OpenAPI document of the inference port, with the bounds of the model that is loaded.

Bodies are described by the very models that check them; the bodies are read by hand (strict JSON, errors in OpenAI's
shape), so the framework cannot derive this. A test holds that every route is here and nothing else.
"""

import re
from importlib.metadata import version
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from worker.api import openapi30
from worker.api import schema_answers as answers
from worker.api.aborting import AbortBody
from worker.api.chat import ChatRequest
from worker.api.completions import CompletionRequest
from worker.api.generate import OWN_FIELDS, GenerateRequest, GenerateSampling
from worker.api.prompts import MAX_PROMPTS
from worker.api.served import ServedModel
from worker.config import WorkerConfig

JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
REF = "#/components/schemas/"
BODIES: tuple[type[BaseModel], ...] = (
    ChatRequest, CompletionRequest, GenerateRequest, GenerateSampling, AbortBody,
)  # fmt: skip
TOLERANCE = (
    "Unknown fields are tolerated. A field that would change the output and is not supported (penalties, logprobs, "
    "tools, response formats, n above 1, …) is refused by name."
)
GENERATION_ERRORS = (400, 404, 408, 409, 413, 429, 499, 500, 503)


class Operation(NamedTuple):
    """One route as the document shows it."""

    summary: str
    answer: dict[str, Any]
    """Content by media type."""
    body: type[BaseModel] | None = None
    errors: tuple[int, ...] = (500, 503)
    description: str = ""
    is_open: bool = False
    """Whether it needs no API key."""


def _json(name: str) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": REF + name}}}


def _json_or_events(name: str) -> dict[str, Any]:
    return _json(name) | {EVENTS: {"schema": {"$ref": REF + "Event"}}}


_HEALTH = Operation("Whether it lives", _json("Status"), is_open=True)
_SERVER_INFO = Operation("Settings, limits and state under SGLang's names", _json("ServerInfo"))
_MODEL_INFO = Operation("What is served, under SGLang's names", _json("ModelInfo"))
_METRICS = Operation(
    "Prometheus metrics",
    {media: {"schema": {"type": "string"}} for media in (TEXT, "application/openmetrics-text")},
    is_open=True,
)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("post", "/v1/chat/completions"): Operation(
        "OpenAI's chat completions", _json_or_events("ChatCompletion"), ChatRequest, GENERATION_ERRORS, TOLERANCE
    ),
    ("post", "/v1/completions"): Operation(
        "OpenAI's text completions", _json_or_events("TextCompletion"), CompletionRequest, GENERATION_ERRORS, TOLERANCE
    ),
    ("post", "/generate"): Operation(
        "SGLang's native generation", _json_or_events("Generated"), GenerateRequest, GENERATION_ERRORS, TOLERANCE
    ),
    ("post", "/v1/requests/{request_id}/abort"): Operation(
        "Abort by exact id", _json("Aborted"), errors=(400, 404, 500, 503)
    ),
    ("post", "/abort_request"): Operation(
        "Abort by exact id (SGLang's name)", _json("Aborted"), AbortBody, errors=(400, 404, 413, 500, 503)
    ),
    ("get", "/v1/models"): Operation("The one model", _json("ModelList")),
    ("get", "/v1/models/{name}"): Operation("One model", _json("Model"), errors=(404, 500, 503)),
    ("get", "/server_info"): _SERVER_INFO,
    ("get", "/get_server_info"): _SERVER_INFO,
    ("get", "/model_info"): _MODEL_INFO,
    ("get", "/get_model_info"): _MODEL_INFO,
    ("get", "/metrics"): _METRICS,
    ("get", "/metrics/"): _METRICS,
    ("get", "/healthz"): _HEALTH,
    ("get", "/health"): _HEALTH,
    ("get", "/readyz"): _HEALTH._replace(summary="Whether the model is loaded and the engine's loop ticks"),
    ("get", "/openapi.json"): Operation("This document", {JSON: {"schema": {"type": "object"}}}, errors=(500,)),
}  # fmt: skip


def openapi_document(model: ServedModel, config: WorkerConfig, *, has_key: bool) -> dict[str, Any]:
    """Return the document; `has_key` says whether an API key is asked for."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method] = _operation(method, path, operation, has_key)
    bodies = _body_schemas()
    if model.is_attached:
        bodies = _bounded(bodies, _Bounds.of(model, config))
    components: dict[str, Any] = {"schemas": bodies | answers.SCHEMAS}
    if has_key:
        components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
    document = {
        "openapi": openapi30.VERSION,
        "info": {"title": "Slipstream worker", "version": version("slipstream")},
        "paths": paths,
        "components": components,
    }
    return dict(openapi30.downgraded(document))


def _operation(method: str, path: str, operation: Operation, has_key: bool) -> dict[str, Any]:
    errors = operation.errors + (() if operation.is_open or not has_key else (401,))
    failure = _json("Status" if operation.answer == _json("Status") else "Error")
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W", "_", f"{method}{path}"),
        "summary": operation.summary,
        "responses": {
            "200": {"description": "OK", "content": operation.answer},
            **{str(status): {"description": answers.ERRORS[status], "content": failure} for status in sorted(errors)},
        },
    }  # fmt: skip
    if operation.description:
        described["description"] = operation.description
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if operation.body is not None:
        content = {JSON: {"schema": {"$ref": REF + operation.body.__name__}}}
        described["requestBody"] = {"required": True, "content": content}
    if has_key and not operation.is_open:
        described["security"] = [{"apiKey": []}]
    return described


def _body_schemas() -> dict[str, Any]:
    """Return the bodies' schemas, with what pydantic cannot know about `/generate` added."""
    _, top = models_json_schema([(body, "validation") for body in BODIES], ref_template=REF + "{model}")
    schemas: dict[str, Any] = top["$defs"]
    generate, sampling = schemas["GenerateRequest"], schemas["GenerateSampling"]
    generate["properties"]["sampling_params"] = {
        "anyOf": [{"$ref": REF + "GenerateSampling"}, {"type": "null"}]
    }
    for name in OWN_FIELDS:
        generate["properties"][name] = sampling["properties"][name]
    text, ids = generate["properties"]["text"]["anyOf"], generate["properties"]["input_ids"]["anyOf"]
    generate["oneOf"] = [
        {"properties": {"text": {"anyOf": text[:-1]}, "input_ids": {"type": "null"}}, "required": ["text"]},
        {
            "properties": {"input_ids": {"anyOf": ids[:-1]}, "text": {"type": "null"}},
            "required": ["input_ids"],
        },
    ]
    return schemas


class _Bounds(NamedTuple):
    """What only a loaded model knows."""

    vocab_size: int
    max_prompt_tokens: int
    max_prompts: int

    @classmethod
    def of(cls, model: ServedModel, config: WorkerConfig) -> "_Bounds":
        info = model.engine.info
        capacity = info.max_running_requests + config.engine.max_waiting_requests
        return cls(model.tokenizer.vocab_size, info.max_context_tokens - 1, min(MAX_PROMPTS, capacity))


def _bounded(node: Any, bounds: _Bounds) -> Any:
    """Return a copy of bodies in which token ids, prompts of ids, and lists of prompts have their real bounds."""
    if isinstance(node, list):
        return [_bounded(item, bounds) for item in node]
    if not isinstance(node, dict):
        return node
    copy = {name: _bounded(value, bounds) for name, value in node.items()}
    if node.get("type") == "array" and node.get("items") == {"type": "integer", "minimum": 0}:
        copy["items"]["maximum"] = bounds.vocab_size - 1
        if "minItems" in node:
            copy["maxItems"] = bounds.max_prompt_tokens
    if node.get("maxItems") == MAX_PROMPTS:
        copy["maxItems"] = bounds.max_prompts
    return copy
