"""Aborting by id: `POST /v1/requests/{id}/abort`, and SGLang's `POST /abort_request`.

An id is what the answer carries: `id` of the OpenAI APIs, `meta_info.id` of `/generate`, the X-Request-Id header.
"""

import logging
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field, ValidationError

from worker.api.errors import ApiError, from_validation, read_json_object
from worker.api.live import LiveRequests
from worker.api.sampling import RequestBody, is_falsy, refuse_unsupported

log = logging.getLogger(__name__)


class AbortBody(RequestBody):
    """Body of `POST /abort_request`."""

    rid: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class AbortRoutes:
    """The two routes."""

    live: LiveRequests

    async def abort(self, request_id: str) -> dict[str, Any]:
        """End the request of exactly this id; its own answer is a 499, or a stream's last event says so."""
        if not request_id:
            raise ApiError(400, "id: must not be empty", param="id", code="invalid_value")
        return self._abort(request_id, "id")

    async def native_abort(self, request: Request) -> dict[str, Any]:
        """End the request of exactly this id (SGLang's name for it)."""
        body = await read_json_object(request)
        refuse_unsupported(body, {"abort_all": is_falsy})
        try:
            wanted = AbortBody.model_validate(body)
        except ValidationError as error:
            raise from_validation(error) from None
        return self._abort(wanted.rid, "rid")

    def _abort(self, name: str, param: str) -> dict[str, Any]:
        if not self.live.abort(name):
            raise ApiError(
                404, f"{param}: no request with exactly this id is in flight", param=param, code="not_found"
            )
        log.info("aborted a request by its id")
        return {"id": name, "aborted": True}
