"""Reads the body of a request: JSON, the form that the learner declares, and the learner's
checks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from pydantic import ValidationError

from runner.plugin.configs import ServedRequest
from runner.serve.bodies import SMALL_BODY
from runner.serve.first_error import first_error_validator
from runner.serve.model import ServedModel

_LONGEST_KEY = 60
"""Characters of a key that a message quotes."""


class MalformedError(Exception):
    """A body that is not a request to this model."""


class RequestReader:
    """Parses and validates bodies outside the event loop.

    Small and large bodies have one thread each: a large one delays no small one, and no two are in memory as Python
    objects and as JSON at the same time.

    Args:
        model: The model whose form of requests is meant.
    """

    def __init__(self, model: ServedModel) -> None:
        self._validator = first_error_validator(model.request)
        self._learner = model.learner
        self._small = ThreadPoolExecutor(1, "small-bodies")
        self._large = ThreadPoolExecutor(1, "large-bodies")

    async def read(self, body: bytes | bytearray) -> ServedRequest:
        """Returns the request.

        Raises:
            MalformedError: The body is not valid JSON, not of the learner's form, or refused by the learner.
            Exception: What a plugin raised.
        """
        executor = self._small if len(body) <= SMALL_BODY else self._large
        return await asyncio.get_running_loop().run_in_executor(executor, self.request, body)

    def request(self, body: bytes | bytearray) -> ServedRequest:
        """Returns the same as ``read``, in the calling thread."""
        value = parse_json(body)
        if not isinstance(value, dict):
            raise MalformedError("body: should be an object")
        try:
            request: ServedRequest = self._validator.validate_python(value)
        except ValidationError as error:
            raise MalformedError(_first_of(error)) from None
        reason = self._learner.refused(request)
        if reason is not None:
            raise MalformedError(reason)
        return request

    def close(self) -> None:
        """Drops the bodies that wait; the threads end when they have read theirs."""
        for executor in (self._small, self._large):
            executor.shutdown(wait=False, cancel_futures=True)


def parse_json(body: bytes | bytearray) -> Any:
    """Returns the value of a JSON text in UTF-8.

    Raises:
        MalformedError: It is not JSON, a key appears twice in an object, or
            objects are nested too deeply.
    """
    if not body:
        raise MalformedError("body: field required")
    try:
        return json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise MalformedError(f"the body is not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise MalformedError(f"the body is not JSON: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise MalformedError("the body is nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise MalformedError(f"the body is not JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object in which no key appears twice: clients and proxies differ in which value they would mean."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise MalformedError(f"the key {name[:_LONGEST_KEY]!r} appears twice in an object")
            names.add(name)
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedError(f"the body is not JSON: {name}")


def _first_of(error: ValidationError) -> str:
    errors = error.errors(include_url=False, include_input=False)
    return malformed(errors)


def malformed(errors: Sequence[Any]) -> str:
    """Returns the first error, and how many more were found before validation stopped, in one line."""
    first = errors[0]
    location = ".".join(map(str, first["loc"])) or "body"
    message = f"{location}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    if len(errors) > 1:
        message += f" (and {len(errors) - 1} more)"
    return message
