"""A learner that answers when it is told to, or fails: ``--plugin`` takes this file beside ``toys.py``."""

import time
from pathlib import Path

import torch
from toys import WORDS, Toy, ToyConfig, WordsConfig  # noqa: F401 (the data)

from runner.api import ServedRequest, ServedResponse


class WordsRequest(ServedRequest):
    """Words to go on with."""

    words: list[int]
    after: str | None = None
    """A file: before it is there, nobody is answered."""
    fail: bool = False

    def group(self):
        return len(self.words)


class NextResponse(ServedResponse):
    """What follows."""

    shares: list[float]


class ObedientConfig(ToyConfig):
    """The toy, served."""

    kind = "toy_obedient"
    request = WordsRequest
    response = NextResponse
    page = "page"

    def implementation(self):
        return Obedient


class Obedient(Toy):
    def refused(self, request):
        return None if all(0 <= word < WORDS for word in request.words) else f"words: should be below {WORDS}"

    def requested(self, requests):
        for path in {request.after for request in requests} - {None}:
            while not Path(path).exists():
                time.sleep(0.005)
        if any(request.fail for request in requests):
            raise RuntimeError("as it was told")
        return torch.tensor([request.words for request in requests])

    def answered(self, requests, outputs):
        return [NextResponse(shares=each) for each in outputs[:, -1].softmax(-1).tolist()]
