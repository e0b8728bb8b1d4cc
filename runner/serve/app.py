"""The routes of the server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request

from runner import __version__
from runner.plugin.faces import ServedRequest
from runner.recipe.recipe import ServeConfig
from runner.serve.batching import Batcher, ClientGoneError, QueueFullError
from runner.serve.limits import Guard, failed, said
from runner.serve.metrics import ServerMetrics
from runner.serve.model import ServedModel

CLIENT_GONE = 499
"""Status of requests whose clients have disconnected, in the metrics; as nginx has it."""


def make_app(model: ServedModel, settings: ServeConfig) -> FastAPI:
    """The application; its batcher is ``app.state.batcher``."""
    metrics = ServerMetrics()
    batcher = Batcher(model.answers, settings, metrics.batch.observe)
    metrics.watch(lambda: batcher.waiting)

    @asynccontextmanager
    async def working(_: FastAPI) -> AsyncIterator[None]:
        work = asyncio.create_task(batcher.run())
        yield
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work

    # Documentation pages would be fetched from elsewhere; openapi.json says the same.
    app = FastAPI(title=model.name, version=__version__, lifespan=working, docs_url=None, redoc_url=None)
    app.state.batcher = batcher
    app.add_middleware(Guard, settings=settings, answered=metrics.answered)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.post("/predict", summary="Ask the model", responses=_answers_of(model))(_predict(model, batcher))
    _add_looks(app, model, batcher, metrics)
    if model.page is not None:
        app.mount("/", StaticFiles(directory=model.page, html=True))
    return app


def _predict(model: ServedModel, batcher: Batcher) -> Any:
    """The route that asks the model."""

    async def predict(request: Any, http: Request) -> Response:
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            return await _answer(model, batcher, request, gone)
        finally:
            gone.cancel()

    predict.__annotations__["request"] = model.request  # by which FastAPI validates and describes it
    return predict


async def _disconnected(http: Request) -> None:
    """Returns when the client has disconnected; the body of its request has been read before."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _answer(
    model: ServedModel, batcher: Batcher, request: ServedRequest, gone: asyncio.Future[None]
) -> Response:  # fmt: skip
    try:
        if (reason := model.learner.refused(request)) is not None:
            return said(422, reason)
        return Response(await batcher.ask(request, gone), media_type="application/json")
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    except QueueFullError as error:
        return said(503, str(error), retry_after=str(error.retry_after))
    except asyncio.CancelledError:  # the server's last word: nothing is left to be cancelled
        return said(503, "the server stops before there is an answer", retry_after="1")
    except TimeoutError:
        return said(504, "the deadline has passed before there was an answer")
    except Exception as error:  # whatever a model raises
        return failed(error)


def _add_looks(app: FastAPI, model: ServedModel, batcher: Batcher, metrics: ServerMetrics) -> None:
    """Adds the routes by which the server is looked at."""

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "ok"}

    @app.get("/ready", response_model=None)
    async def ready() -> Response | dict[str, str]:
        """Whether a request would be taken now."""
        return said(503, "the queue is full", retry_after="1") if batcher.full else {"status": "ready"}

    @app.get("/model")
    async def about() -> dict[str, Any]:
        """What is served."""
        return {"name": model.name, **model.about}

    @app.get("/metrics", response_class=Response)
    async def counted() -> Response:
        """Counters for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _answers_of(model: ServedModel) -> dict[int | str, dict[str, Any]]:
    errors = {408: "The body did not come.", 413: "The body is too long.", 422: "The request is malformed.",
              500: "The model failed.", 503: "Too many wait; Retry-After says for how long.",
              504: "The deadline has passed."}  # fmt: skip
    return {200: {"model": model.response}, **{status: {"description": each} for status, each in errors.items()}}


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return said(error.status_code, error.detail, **(error.headers or {}))


async def _malformed(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return said(422, malformed(error.errors()))


def malformed(errors: Sequence[Any]) -> str:
    """What is wrong with a request, in one line: the first error, and how many more there are."""
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"][1:]) or "body"
    reason = first.get("ctx", {}).get("error", "") if first["type"] == "json_invalid" else ""
    message = (
        f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}" if not reason else f"the body is no JSON: {reason}"
    )
    return message + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else "")
