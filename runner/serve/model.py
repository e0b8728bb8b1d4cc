"""A served model: a learner that answers requests of a declared form."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runner.plugin.configs import LearnerConfig, ServedRequest, ServedResponse
from runner.plugin.learner import Learner
from runner.plugin.plugin_errors import described, mistake
from runner.plugin.stage import Stage
from runner.serve.example import example_of
from runner.system.errors import TRACEBACK, UsageError
from runner.system.secrets import redact, redact_values
from runner.system.stored_json import json_values

_log = logging.getLogger(__name__)
_LONGEST_REQUEST = 200
"""Characters of a request that are logged with an error."""

Answer = bytes | Exception
"""JSON, or why there is none."""


@dataclass(frozen=True)
class ServedModel:
    """A learner with the forms of its requests and answers."""

    name: str
    """Of the run, or of the version."""
    learner: Learner
    request: type[ServedRequest]
    response: type[ServedResponse]
    page: Path | None
    """A folder with ``index.html``."""
    about: dict[str, Any]
    """Further facts for clients."""
    example: dict[str, Any] | None = None
    """A request that the model can answer, as JSON."""
    copies: tuple[Learner, ...] = ()
    """Further learners with the same weights, which answer at the same time."""
    stages: tuple[tuple[str, Stage], ...] = ()
    """Kinds and implementations of the stages of all copies."""
    stream: torch.cuda.Stream | None = None
    """Where a GPU computes the answers, unless in its default stream."""

    def program_calls(self) -> dict[tuple[str, str], int]:
        """Returns calls by stage and by what answered them: ``program`` or ``network``."""
        counts: Counter[tuple[str, str]] = Counter()
        for kind, stage in self.stages:
            if stage.program_bytes:
                counts[kind, "program"] += stage.program_calls
                counts[kind, "network"] += stage.network_calls
        return dict(counts)

    def closing_notes(self) -> list[str]:
        """Returns what the stages report at the end."""
        return [f"{kind}: {note}" for kind, stage in self.stages for note in stage.closing_notes()]

    def parallel(self) -> list[ServedModel]:
        """Returns one model for each copy, to be used by one thread each; on a GPU, each has its own stream, so that
        their kernels and copies can overlap.
        """
        learners = (self.learner, *self.copies)
        device = self.learner.device
        if len(learners) == 1 or device.type != "cuda":
            return [replace(self, learner=learner) for learner in learners]
        # A new stream does not wait for the weights, which were copied in the default one.
        torch.cuda.synchronize(device)
        streams = [torch.cuda.Stream(device) for _ in learners]  # type: ignore[no-untyped-call]
        return [
            replace(self, learner=learner, stream=stream) for learner, stream in zip(learners, streams, strict=True)
        ]

    def answers(self, requests: Sequence[ServedRequest]) -> list[Answer]:
        """Returns one answer for each request of a group; if the batch fails,
        each request is computed alone.
        """
        try:
            return [*self._together(requests)]
        except Exception as error:
            # In a batch, the request that caused the error is unknown.
            if len(requests) == 1:
                error.add_note(f"the request: {redact(requests[0].model_dump_json())[:_LONGEST_REQUEST]}")
                log_failure(error)
                return [error]
        return [answer for request in requests for answer in self.answers([request])]

    def _together(self, requests: Sequence[ServedRequest]) -> list[bytes]:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            outputs = self.learner.predict(self.learner.requested(requests))
            responses = self.learner.answered(requests, outputs)
        return [response.model_dump_json().encode() for response in responses]


def log_failure(error: Exception) -> None:
    """Logs an error in a plugin that answered a request, in one paragraph."""
    message = mistake(error) or redact(described(error))
    _log.warning("a request failed: %s", message, exc_info=error if os.environ.get(TRACEBACK) else None)


def served(
    name: str,
    learner: Learner,
    config: LearnerConfig,
    about: dict[str, Any],
    copies: Sequence[Learner] = (),
    stages: Sequence[tuple[str, Stage]] = (),
) -> ServedModel:
    """Returns the learner as it is served.

    Raises:
        UsageError: Its config declares no form of requests.
    """
    if config.request is None or config.response is None:
        raise UsageError(f"{name}: learner '{config.kind}' cannot be served: it declares no request and response")
    file = sys.modules[type(config).__module__].__file__
    page = None if config.page is None or file is None else Path(file).parent / config.page
    return ServedModel(
        name=redact(name),
        learner=learner,
        request=config.request,
        response=config.response,
        page=page,
        about=json_values(redact_values({"kind": config.kind, **about})),
        example=example_of(learner, config.request),
        copies=tuple(copies),
        stages=tuple(stages),
    )
