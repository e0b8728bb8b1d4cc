"""A learner that answers when it is told to, or fails: ``--plugin`` takes this file beside ``toys.py``."""

import time
from pathlib import Path

import torch
from pydantic import field_validator
from toys import WORDS, Toy, ToyConfig, WordsConfig  # noqa: F401 (the data)

from runner.api import ServedRequest, ServedResponse


class WordsRequest(ServedRequest):
    """Words to go on with."""

    words: list[int]
    after: str | None = None
    """A file: before it is there, nobody is answered."""
    fail: bool = False
    refuse: bool = False
    invalid: bool = False
    passes: int = 1
    """How often the module is called."""
    naps: int = 0
    """Calls of C that take a tenth of a second each."""

    @field_validator("invalid")
    @classmethod
    def validated(cls, value):
        if value:
            raise KeyError("validated otherwise")
        return value

    def group(self):
        return len(self.words)


class NextResponse(ServedResponse):
    """What follows."""

    shares: list[float]


class ObedientConfig(ToyConfig):
    """The toy, served."""

    kind = "toy_obedient"
    implementation = "Obedient"
    request = WordsRequest
    response = NextResponse
    page = "page"


class Obedient(Toy):
    passes = 1

    def refused(self, request):
        if request.refuse:
            raise LookupError("refused otherwise")
        return None if all(0 <= word < WORDS for word in request.words) else f"words: should be below {WORDS}"

    def requested(self, requests):
        for path in {request.after for request in requests} - {None}:
            while not Path(path).exists():
                time.sleep(0.005)
        if any(request.fail for request in requests):
            raise RuntimeError("as it was told")
        self.passes = max(request.passes for request in requests)
        for _ in range(max(request.naps for request in requests)):
            time.sleep(0.1)
        return torch.tensor([request.words for request in requests])

    def predict(self, inputs):
        for _ in range(self.passes - 1):
            super().predict(inputs)
        return super().predict(inputs)

    def answered(self, requests, outputs):
        return [NextResponse(shares=each) for each in outputs[:, -1].softmax(-1).tolist()]


class PlainConfig(ObedientConfig):
    """The same without a page of its own."""

    kind = "toy_plain"
    page = None
