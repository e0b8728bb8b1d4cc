"""The answers of the server that are not a model's: errors in one line, always as JSON."""

from __future__ import annotations

import json
from http import HTTPStatus

from pydantic import BaseModel
from starlette.responses import JSONResponse

from runner.system.secrets import redact

SOURCES = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'"
"""Sources that a page may load from: only this server."""
SECURITY_HEADERS = {"content-security-policy": SOURCES, "x-content-type-options": "nosniff"}
RETRY_AFTER_S = 1
"""Seconds after which a client may try again if the server cannot estimate the time."""
_LONGEST_MESSAGE = 300
"""Characters of a message that may quote a request."""


class ErrorAnswer(BaseModel):
    """Any answer but 200."""

    error: str
    """The reason, in one line."""


def error_response(status: int, message: str, **headers: str) -> JSONResponse:
    """Returns an error; an underscore in the name of a header represents a hyphen."""
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.setdefault("retry_after", str(RETRY_AFTER_S))
    content = ErrorAnswer(error=shortened(message)).model_dump()
    return JSONResponse(content, status, {name.replace("_", "-"): value for name, value in headers.items()})


def failure_response(error: Exception) -> JSONResponse:
    """Returns the answer to a request in which a plugin raised an error."""
    reason = redact(str(error)).partition("\n")[0]
    return error_response(500, f"the model failed: {type(error).__name__}: {reason}")


def raw_error_response(status: int, message: str) -> bytes:
    """Returns the bytes of an error after which the connection closes, for connections without a valid request."""
    content = json.dumps(ErrorAnswer(error=shortened(message)).model_dump()).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        "connection": "close",
        **SECURITY_HEADERS,
    }
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["retry-after"] = str(RETRY_AFTER_S)

    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


def shortened(message: str) -> str:
    """Returns the beginning of a message that may quote parts of a request."""
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."
