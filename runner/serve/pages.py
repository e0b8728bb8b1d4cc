"""Pages of the server: the page of the model at ``/``, and the documentation of the API at ``/docs``."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from starlette.responses import HTMLResponse, Response

from runner.serve.responses import SOURCES, error_response

_GENERIC = Path(__file__).parent / "page"
"""The generic page of models without a specific one, and the style that other pages may use."""
_DOCS = "fastapi_offline"
"""The distribution with the scripts of the documentation page."""


def add_page(app: FastAPI, folder: Path | None) -> None:
    """Mounts the model's page at the root; missing files are replaced by those of the generic
    page.
    """
    files = StaticFiles(directory=_GENERIC if folder is None else folder, html=True)
    if folder is not None:
        # Folders are searched in order, so that the model's files come first.
        files.all_directories.append(_GENERIC)
    app.mount("/", files)


def add_docs(app: FastAPI) -> None:
    """Adds FastAPI's documentation page. It loads everything from this server."""
    spec = find_spec(_DOCS)
    if spec is None or spec.origin is None:

        @app.get("/docs", include_in_schema=False)
        async def missing() -> Response:
            return error_response(404, "the documentation page needs: pip install fastapi-offline; see /openapi.json")

        return
    app.mount("/docs/files", StaticFiles(directory=Path(spec.origin).parent / "static"))
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=app.title,
        swagger_js_url="docs/files/swagger-ui-bundle.js",
        swagger_css_url="docs/files/swagger-ui.css",
        swagger_favicon_url="docs/files/favicon.png",
    )
    html = bytes(page.body).decode()
    # The digest of the page's only script allows that script, and no other inline script.
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digests = [b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    sources = f"script-src 'self' {allowed}; {SOURCES}"

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(html, headers={"content-security-policy": sources})
