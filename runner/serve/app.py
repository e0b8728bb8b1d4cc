"""The routes of the server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from runner import __version__
from runner.plugin.configs import ServedRequest
from runner.recipe.recipe import ServeConfig
from runner.serve.batching import Batcher, ClientGoneError, QueueFullError
from runner.serve.bodies import Bodies
from runner.serve.connections import SURPLUS
from runner.serve.example import curl_command
from runner.serve.guard import Guard
from runner.serve.metrics import ServerMetrics
from runner.serve.model import ServedModel, log_failure
from runner.serve.pages import add_docs, add_page
from runner.serve.reading import MalformedError, RequestReader
from runner.serve.responses import ErrorAnswer, error_response, failure_response

CLIENT_GONE = 499
"""Status of requests whose clients have disconnected, in the metrics; as nginx has it."""
RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
ERRORS = {
    400: "The request is not valid HTTP, or its Host is not allowed (serve.hosts).",
    408: "The body did not come.",
    413: "The body is too long (serve.max_body_bytes).",
    415: "The body is not declared as application/json in UTF-8.",
    422: "The body is not JSON, has a key twice, or is not a request to this model.",
    500: "The model failed.",
    503: "Too many requests wait, too many clients are connected, or the server stops.",
    504: "The deadline has passed (serve.deadline_s).",
}
"""Answers to ``/predict`` but 200."""


def make_app(model: ServedModel, settings: ServeConfig) -> FastAPI:
    """The application; its batcher is ``app.state.batcher``."""
    metrics = ServerMetrics()
    copies = [copy.answers for copy in model.parallel()]
    batcher = Batcher(copies, settings, metrics.batch.observe)
    reader = RequestReader(model)
    # The number is read when the metrics are requested, so that it needs no updates.
    metrics.watch(lambda: batcher.waiting)
    metrics.watch_programs(model.program_calls)

    @asynccontextmanager
    async def working(_: FastAPI) -> AsyncIterator[None]:
        work = asyncio.create_task(batcher.run())
        yield
        reader.close()
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work

    # FastAPI's documentation page would load its scripts from another server: see add_docs.
    app = FastAPI(
        title=model.name,
        version=__version__,
        lifespan=working,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.batcher = batcher
    app.add_middleware(Guard, settings=settings, answered=metrics.answered)
    app.add_exception_handler(HTTPException, _refused)
    _add_predict(app, model, _Predictor(reader, batcher, settings))
    _add_status(app, model, batcher, metrics)
    add_docs(app)
    add_page(app, model.page)
    return app


class _Predictor:
    """Answers requests to the model."""

    def __init__(self, reader: RequestReader, batcher: Batcher, settings: ServeConfig) -> None:
        self._reader = reader
        self._batcher = batcher
        self._bodies = Bodies(settings)
        self._deadline_s = settings.deadline_s

    async def __call__(self, http: Request) -> Response:
        """Answers a request."""
        try:
            return Response(await self._answer(http), media_type="application/json")
        except HTTPException:
            raise
        except asyncio.CancelledError:
            # The server is about to stop, so nothing is left to be cancelled.
            self._batcher.cut_off += 1
            return error_response(503, "the server stops before there is an answer")
        except Exception as error:
            return _response_to(error)

    async def _answer(self, http: Request) -> bytes:
        async with self._bodies.received(http) as body, asyncio.timeout(self._deadline_s):
            if http.scope[SURPLUS]():
                raise HTTPException(503, "too many clients are connected")
            request = await self._read(body)
        # Only now: before the body is complete, it would take messages of the body.
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            return await self._batcher.ask(request, gone)
        finally:
            gone.cancel()

    async def _read(self, body: bytearray) -> ServedRequest:
        try:
            return await self._reader.read(body)
        except MalformedError:
            raise
        except Exception as error:
            log_failure(error)
            raise


def _response_to(error: Exception) -> Response:
    """Returns the answer where there is none of the model."""
    match error:
        case MalformedError():
            return error_response(422, str(error))
        case ClientDisconnect() | ClientGoneError():
            return Response(status_code=CLIENT_GONE)
        case QueueFullError():
            return error_response(503, str(error), retry_after=str(error.retry_after))
        case TimeoutError():
            return error_response(504, "the deadline has passed before there was an answer")
        case _:
            return failure_response(error)


async def _disconnected(http: Request) -> None:
    """Returns when the client has disconnected; the body of its request has been read before."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _add_predict(app: FastAPI, model: ServedModel, predictor: _Predictor) -> None:
    """Adds the route of the model.

    FastAPI describes it in the OpenAPI document. It does not read the body, since it would do so in the event loop.
    """

    class PredictRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            return predictor.__call__

    def predict(request: Any) -> Any:
        """Returns the model's answer to one request."""

    # The type of the body is known only at run time, and FastAPI reads annotations.
    predict.__annotations__["request"] = model.request
    app.router.add_api_route(
        "/predict",
        predict,
        methods=["POST"],
        summary="Send a request to the model",
        responses=_documented_answers(model),
        response_model=None,
        route_class_override=PredictRoute,
    )


def _documented_answers(model: ServedModel) -> dict[int | str, dict[str, Any]]:
    answers: dict[int | str, dict[str, Any]] = {200: {"model": model.response}}
    for status, description in ERRORS.items():
        answers[status] = {"model": ErrorAnswer, "description": description}
    answers[503]["headers"] = RETRY_AFTER
    return answers


def _add_status(app: FastAPI, model: ServedModel, batcher: Batcher, metrics: ServerMetrics) -> None:
    """Adds the routes that describe the server and its state."""

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Reports that the process answers."""
        return {"status": "ok"}

    @app.get(
        "/ready",
        response_model=None,
        responses={503: {"model": ErrorAnswer, "headers": RETRY_AFTER}},
    )
    async def ready() -> Response | dict[str, str]:
        """Reports whether a request would be accepted now."""
        if batcher.full:
            return error_response(503, "the queue is full")
        return {"status": "ready"}

    @app.get("/model")
    async def about(http: Request) -> dict[str, Any]:
        """Name, settings and example of the model."""
        address = str(http.base_url).rstrip("/")
        example = {"example": model.example, "curl": curl_command(address, model.example)}
        return {"name": model.name, **model.about, **example}

    @app.get("/example", response_model=None, responses={404: {"model": ErrorAnswer}})
    async def example() -> Response | dict[str, Any]:
        """A request that the model can answer."""
        if model.example is None:
            return error_response(404, "this model has no example of a request")
        return model.example

    @app.get("/metrics", response_class=Response)
    async def counted() -> Response:
        """Counters for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail, **(error.headers or {}))
