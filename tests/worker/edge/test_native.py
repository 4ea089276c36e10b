"""What SGLang's clients and benchmarks read beside `/generate`, and that the OpenAPI document tells the truth."""

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from starlette.routing import Route

from worker.api.generate import OWN_FIELDS
from worker.api.schema import OPERATIONS
from worker.api.served import ServedModel
from worker.config import WorkerConfig
from worker.engine_thread import EngineThread
from worker.server import create_app


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_has_what_sglangs_clients_read(
    client: TestClient, engine: EngineThread, config: WorkerConfig, path: str
) -> None:
    sampling = {"max_new_tokens": 20, "ignore_eos": True}
    client.post("/generate", json={"text": "ababab", "sampling_params": sampling})
    info = client.get(path).json()
    assert info["served_model_name"] == "tiny"
    assert info["tokenizer_path"] == config.model.path
    assert info["max_total_num_tokens"] == engine.stats().queue.kv_tokens_total
    assert info["speculative_algorithm"] == "NGRAM"
    (state,) = info["internal_states"]
    assert state["speculative_num_steps"] == engine.stats().plan.num_steps
    assert state["speculative_num_draft_tokens"] == state["speculative_num_steps"] + 1
    assert state["avg_spec_accept_length"] >= 1
    assert state["last_gen_throughput"] > 0
    assert client.get(path).json()["internal_states"][0]["last_gen_throughput"] == 0, "nothing since"


def test_accept_length_is_absent_before_the_first_round(scripted_client: TestClient, scripted: Any) -> None:
    scripted.frozen_stats = scripted.frozen_stats.model_copy(update={"buckets": []})
    assert "avg_spec_accept_length" not in scripted_client.get("/server_info").json()["internal_states"][0]


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(client: TestClient, config: WorkerConfig, path: str) -> None:
    assert client.get(path).json() == {
        "model_path": config.model.path,
        "tokenizer_path": config.model.path,
        "is_generation": True,
    }


def test_the_document_has_every_route_and_no_other(app: FastAPI) -> None:
    routes = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    assert routes == set(OPERATIONS)


def test_the_documents_bounds_are_the_models(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    ids = schemas["GenerateRequest"]["properties"]["input_ids"]["anyOf"]
    assert ids[0]["items"] == {"type": "integer", "minimum": 0, "maximum": 257}
    assert ids[0]["maxItems"] == 511
    assert ids[1]["maxItems"] == 12
    counts = schemas["Generated"]["anyOf"][0]["properties"]["meta_info"]["properties"][
        "spec_accept_histogram"
    ]
    assert counts["items"] == {"type": "integer", "minimum": 0}, "counts are no token ids"
    assert set(OWN_FIELDS) <= set(schemas["GenerateRequest"]["properties"])
    assert "security" not in document["paths"]["/generate"]["post"]
    names = {operation["operationId"] for path in document["paths"].values() for operation in path.values()}
    assert len(names) == len(OPERATIONS)


def test_while_loading_there_is_a_document_without_them(config: WorkerConfig) -> None:
    with TestClient(create_app(ServedModel(), config, registry=CollectorRegistry())) as client:
        document = client.get("/openapi.json").json()
    ids = document["components"]["schemas"]["GenerateRequest"]["properties"]["input_ids"]["anyOf"]
    assert "maximum" not in ids[0]["items"]


def references(node: Any) -> set[str]:
    if isinstance(node, list):
        return {name for item in node for name in references(item)}
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
    return own | {name for value in node.values() for name in references(value)}


def test_no_reference_hangs_in_the_air(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= schemas
