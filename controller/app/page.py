"""The controller's own page: static files of the package, sent with headers that let nothing else in.

The page needs no token to be loaded: it holds no data. It asks the API with the token that its user gives.
"""

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

WEB = Path(__file__).parents[1] / "web"
MOUNT = "/web"

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # the style sheet's own symbols
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types lit-html",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Ask whether it changed, every time: after an upgrade nobody looks at a page half old, half new.
    "Cache-Control": "no-cache",
}


class _Files(StaticFiles):
    def file_response(
        self, full_path: Any, stat_result: Any, scope: MutableMapping[str, Any], status_code: int = 200
    ) -> Response:
        """Send a file with our headers."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """Serve the page at `/` and its parts below `/web/`."""

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        """The page."""
        return FileResponse(WEB / "index.html", headers=HEADERS)

    app.mount(MOUNT, _Files(directory=WEB), name="web")
