"""Compares what a measured variant trains with the baseline's training, in the processes that
were timed.

The baseline records batches. A variant makes windows of a few updates with them, from the state
that its timed updates have led to, and sends that state and what the updates did. The baseline
loads the state and makes the same updates.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from runner.plugin.contract import Close, Statistical
from runner.plugin.source import State
from runner.proof.trees import clones, on_host
from runner.proof.windows import UPDATES, Comparison, Window, observe, rounded
from runner.training.step import Drawn, Step

WINDOWS = 3
YARDSTICK_SEEDS = 2
OTHER_NUMBERS = 1_000_003
"""Offset of the number of an update for random numbers that differ from those of the update."""


@dataclass(frozen=True)
class RecordedBatch:
    """A batch of the baseline's training with its noise, and the counts before its update."""

    drawn: Drawn
    counts: dict[str, int]


def record(step: Step, few: bool) -> bytes:
    """Draws the batches of all windows; ``few`` where an update takes long.

    Windows have different lengths, so that they meet what is skipped in every few updates.
    """
    length = UPDATES // 2 if few else UPDATES
    windows = []
    for number in range(WINDOWS):
        batches = []
        for _ in range(length + number % 2):
            sample = step.next()
            batches.append(RecordedBatch(on_host(sample), step.progress.state_dict()))
            # Sources may change with the progress, so the batches are counted as in a training.
            step.count(sample.batch)
            step.progress.updates += 1
        windows.append(batches)
    return _packed(windows)


def make(step: Step, recorded: bytes) -> bytes:
    """Makes windows with recorded batches; yields each with its batches and the prior state."""
    windows = []
    for batches in _unpacked(recorded):
        state = on_host(step.learner.complete_state())
        windows.append((batches, state, _window(step, batches)))
    return _packed(windows)


def judge(step: Step, made: bytes, *, statistical: bool) -> dict[str, Any]:
    """Makes the same updates as a variant from the same states, and returns what is wrong with
    the variant's.

    Args:
        step: The baseline's.
        made: What ``make`` returned in the variant's process.
        statistical: Whether the variant promises neither bits nor algebra: then only the number of
            updates is compared.
    """
    comparison = Comparison(Statistical() if statistical else Close())
    # A plugin may raise anything, and the times are valid without the comparison.
    try:
        _compare(step, made, comparison)
    except Exception as error:
        reason = f"the baseline cannot make the same updates: {type(error).__name__}: {error}"
        return {"updates": 0, "caught": "", "reason": reason}
    return {
        "updates": comparison.updates,
        "caught": comparison.fault() or "",
        "reason": "",
    }


def _compare(step: Step, made: bytes, comparison: Comparison) -> None:
    for batches, state, candidate in _unpacked(made):
        load_learner(step, state)
        baseline = _window(step, batches)
        comparison.add(baseline, candidate)
        if not comparison.is_deviating(baseline, candidate):
            continue
        # Yardsticks cost as much as the comparison, and only a deviation needs them.
        for seed in range(YARDSTICK_SEEDS):
            load_learner(step, rounded(state, seed))
            yardstick = _window(step, batches, OTHER_NUMBERS * (seed + 1))
            comparison.yardsticks.append((baseline, yardstick))


def load_learner(step: Step, state: State) -> None:
    """Loads a state into the learner; stages restart from their current state."""
    step.learner.load_complete_state(clones(state))
    step.reset()
    for stage in step.pipeline.stages.values():
        stage.load_state_dict(stage.state_dict())


def _window(step: Step, batches: list[RecordedBatch], other: int = 0) -> Window:
    return observe(
        partial(_parts, step),
        [partial(_update, step, recorded, other) for recorded in batches],
    )


def _update(step: Step, recorded: RecordedBatch, other: int) -> Mapping[str, Any]:
    batch, noise = step.pipeline.transfer(clones(recorded.drawn))
    step.progress.load_state_dict(recorded.counts)
    step.seed(recorded.counts["updates"] + other)
    return step.update(Drawn(batch, noise))


def _parts(step: Step) -> dict[str, Any]:
    """The learner's state, with a part for each module and each optimizer."""
    parts: dict[str, Any] = {}
    for section, state in step.learner.complete_state().items():
        if isinstance(state, dict):
            parts |= {f"{section} {name}": value for name, value in state.items()}
        else:
            parts[section] = state
    return parts


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(content: bytes) -> Any:
    # The content is trusted: it comes from a process of this measurement, over a private socket.
    return torch.load(io.BytesIO(content), weights_only=False)
