"""Races between the steps of a training on a GPU, their correct forms, and what ``runner.proof.verify`` finds.

    python experiments/gpu/races.py

Each training copies its batches from the host. Three forms use memory before a copy has finished
with it. A CUDA graph with a capturable optimizer is correct. Prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.proof import Build, Close, Exact, Subject, verify

DEVICE = "cuda"
BATCHES, ROWS, WIDTH = 12, 4096, 256
Load = Callable[[Tensor], Tensor]


def training(make_load: Callable[[], Load], use_graph: bool = False) -> Subject:
    """Returns a training of a small network, whose batches are copied by a function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, 1)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=use_graph)
    load = make_load()

    def update(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad(set_to_none=not use_graph)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if not use_graph:
        return Subject(lambda batch: update(load(batch)), {"model": model, "optimizer": optimizer})
    step = GraphedUpdate(update, model, optimizer)
    return Subject(lambda batch: step(load(batch)), {"model": model, "optimizer": step})


class GraphedUpdate:
    """An update that is captured at its first call and replayed; its state is the optimizer's."""

    def __init__(self, update: Load, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.update = update
        self.model, self.optimizer = model, optimizer
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.graph is None:
            self._capture(x)
        self.x.copy_(x)
        assert self.graph is not None
        self.graph.replay()
        return self.loss.clone()

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it, and forgets the graph, which writes to the tensors from before."""
        self.optimizer.load_state_dict(state)
        self.graph = None

    def _capture(self, x: Tensor) -> None:
        self.x = x.clone()
        before = {tensor: tensor.detach().clone() for tensor in self._tensors()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.update(self.x)
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad():
            for tensor in self._tensors():
                # The first update makes the optimizer's state, which starts at zero.
                tensor.copy_(before.get(tensor, torch.zeros_like(tensor)))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.update(self.x)

    def _tensors(self) -> list[Tensor]:
        states = (state.values() for state in self.optimizer.state.values())
        return [*self.model.parameters(), *itertools.chain.from_iterable(states)]


def plain() -> Load:
    """Copies and waits."""
    return lambda batch: batch.to(DEVICE)


def pinned(waits: bool) -> Load:
    """Copies through one pinned buffer; without waiting, it is rewritten while a copy may be in flight."""
    buffer = torch.empty(ROWS, WIDTH).pin_memory()
    copied = torch.cuda.Event()

    def load(batch: Tensor) -> Tensor:
        if waits:
            copied.synchronize()
        buffer.copy_(batch)
        on_device = buffer.to(DEVICE, non_blocking=True)
        copied.record()
        return on_device

    return load


def side_stream(waits_for_readers: bool = True, waits_for_copy: bool = True) -> Load:
    """Copies on a side stream to one place of the device."""
    stream = torch.cuda.Stream()
    place = torch.zeros(ROWS, WIDTH, device=DEVICE)

    def load(batch: Tensor) -> Tensor:
        buffer = batch.pin_memory()
        if waits_for_readers:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            place.copy_(buffer, non_blocking=True)
        if waits_for_copy:
            torch.cuda.current_stream().wait_stream(stream)
        else:
            # The buffer of the host lives until it is copied.
            load.buffers = [*getattr(load, "buffers", [])[-8:], buffer]
        return place

    return load


CASES: dict[str, tuple[str, Build, Any]] = {
    "pinned buffer, waits": ("PASS", partial(training, partial(pinned, True)), Exact()),
    "pinned buffer rewritten in flight": ("FAIL", partial(training, partial(pinned, False)), Exact()),
    "side stream, waits": ("PASS", partial(training, side_stream), Exact()),
    "side stream overwrites what is read": (
        "FAIL", partial(training, partial(side_stream, waits_for_readers=False)), Exact(),
    ),
    "copy is not waited for": ("FAIL", partial(training, partial(side_stream, waits_for_copy=False)), Exact()),
    "CUDA graph with a capturable optimizer": ("PASS", partial(training, plain, use_graph=True), Close()),
}  # fmt: skip


def main() -> None:
    """Judges every case."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(BATCHES)]
    rows = {}
    for name, (expected, changed, contract) in CASES.items():
        started = time.perf_counter()
        verdict = verify(partial(training, plain), changed, batches, contract)
        rows[name] = {
            "expected": expected, "verdict": str(verdict.outcome), "seconds": round(time.perf_counter() - started, 1),
            "summary": verdict.summary[:400],
        }  # fmt: skip
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
