"""What the inference port answers, as JSON schemas: for its OpenAPI document only.

Members that clients should rely on are required; others may come.
"""

from typing import Any

ERRORS = {
    400: "A field is wrong (`param` names it), or the body is no JSON",
    401: "The API key is missing or wrong",
    404: "There is no such model or request",
    408: "The request's own timeout_seconds passed before its first token",
    409: "A request with this id is in flight",
    413: "The body is too large",
    429: "The queue is full; see Retry-After",
    499: "The request was aborted by its id",
    500: "The worker's own fault",
    503: "The model is loading, or the worker is stopping; see Retry-After",
}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _const(value: Any) -> dict[str, Any]:
    return {"const": value}


STRING = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
SECONDS = {"type": "number", "minimum": 0}
HISTOGRAM = _array(COUNT)
FINISH = {"enum": ["stop", "length", "abort"]}
STOP_REASON = {"anyOf": [STRING, COUNT, {"type": "null"}]}

USAGE = _object(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": _object({"cached_tokens": COUNT}),
    }
)
SPECULATION = _object(
    {
        "mean_acceptance_length": {"type": "number", "minimum": 1},
        "draft_acceptance_rate": {"type": "number", "minimum": 0, "maximum": 1},
        "acceptance_histogram": HISTOGRAM,
        "acceptance_histogram_by_draft_length": {"type": "object", "additionalProperties": HISTOGRAM},
        "num_spec_steps": COUNT,
        "num_accepted_draft_tokens": COUNT,
        "num_draft_tokens": COUNT,
        "num_spec_tokens": {"type": "null"},
    },
    per_step_accepted=HISTOGRAM,
    per_step_drafted=HISTOGRAM,
)
METRICS = _or_null(_object({"speculative_decoding": SPECULATION}))


def _completion(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    choice = _object(
        {
            "index": COUNT,
            **content,
            "logprobs": {"type": "null"},
            "finish_reason": FINISH,
            "stop_reason": STOP_REASON,
        }
    )
    head = {"id": STRING, "object": _const(kind), "created": COUNT, "model": STRING}
    return _object({**head, "choices": _array(choice), "usage": USAGE}, metrics=METRICS)


MODEL = _object(
    {
        "id": STRING,
        "object": _const("model"),
        "created": COUNT,
        "owned_by": STRING,
        "max_model_len": COUNT,
    }
)
GENERATED = _object(
    {
        "text": STRING,
        "output_ids": _array(COUNT),
        "meta_info": _object(
            {
                "id": STRING,
                "finish_reason": _object({"type": {"enum": ["stop", "length", "abort"]}}),
                "prompt_tokens": COUNT,
                "completion_tokens": COUNT,
                "cached_tokens": COUNT,
                "e2e_latency": SECONDS,
                "spec_verify_ct": COUNT,
                "spec_accept_token_num": COUNT,
                "spec_draft_token_num": COUNT,
                "spec_accept_histogram": HISTOGRAM,
            },
            spec_accept_length={"type": "number", "minimum": 1},
            spec_accept_rate={"type": "number", "minimum": 0, "maximum": 1},
        ),
    }
)

SCHEMAS: dict[str, Any] = {
    "Error": _object(
        {
            "error": _object(
                {"message": STRING, "type": STRING, "param": _or_null(STRING), "code": _or_null(STRING)}
            )
        }
    ),
    "Event": _object({"data": STRING}),  # a chunk as JSON, or [DONE]
    "Status": _object({"status": STRING}, detail=STRING),
    "ChatCompletion": _completion(
        "chat.completion",
        {"message": _object({"role": _const("assistant"), "content": STRING, "refusal": {"type": "null"}})},
    ),
    "TextCompletion": _completion("text_completion", {"text": STRING}),
    "Generated": {"anyOf": [GENERATED, _array(GENERATED)]},
    "Aborted": _object({"id": STRING, "aborted": _const(True)}),
    "Model": MODEL,
    "ModelList": _object({"object": _const("list"), "data": _array(MODEL)}),
    "ModelInfo": _object(
        {"model_path": STRING, "tokenizer_path": STRING, "is_generation": {"type": "boolean"}}
    ),
    "ServerInfo": _object(
        {
            "model_path": STRING,
            "tokenizer_path": STRING,
            "served_model_name": STRING,
            "version": STRING,
            "context_length": COUNT,
            "max_running_requests": COUNT,
            "max_total_num_tokens": COUNT,
            "speculative_algorithm": _or_null(STRING),
            "speculative_num_steps": COUNT,
            "internal_states": _array(
                _object(
                    {
                        "speculative_num_steps": COUNT,
                        "speculative_num_draft_tokens": COUNT,
                        "last_gen_throughput": SECONDS,
                        "memory_usage": _object({"token_capacity": COUNT}),
                        "effective_max_running_requests_per_dp": COUNT,
                    },
                    avg_spec_accept_length={"type": "number", "minimum": 1},
                )
            ),
        }
    ),
}
