"""Compares a training step that the host waits for with the same step while the device is behind.

A step may use memory before the device has written it, or overwrite memory that the device has
yet to read. Comparisons read results after every step, so that nothing is in flight between two
steps, and such a race has no effect on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from runner.proof.device_queues import DeviceQueues
from runner.proof.difference import Difference, describe_first, not_same_bits
from runner.proof.isolation import Frame, Isolation, StepError, output_frame
from runner.proof.subject import Build
from runner.proof.trajectory import Trajectory
from runner.proof.trees import clones, on_host
from runner.proof.verdict import Outcome, Verdict

FEWEST_SECONDS = 0.02
"""Length of a delay, at least."""
MOST_SECONDS = 1.0
# Length of a delay, in steps that the host waits for, so that the host is ahead of the device.
_STEPS_OF_DELAY = 2
MOST_UPDATES = 6
"""Updates of each run. A delay precedes every update, so that a race shows in the first ones."""


def compare_in_flight(
    build: Build,
    batches: Sequence[Any],
    queues: DeviceQueues,
    contract: str,
    seed: int,
) -> Verdict:
    """Returns whether a step has the same results however late its device is.

    The steps are made with the host waiting after each, without waiting, and with the main queue or
    the side queues of the device delayed before each step.

    Args:
        build: Makes the training.
        batches: One for each update; the first ``MOST_UPDATES`` are used.
        queues: The queues of the device.
        contract: Name of the contract for the verdict.
        seed: Of the global random generators.
    """
    batches = batches[:MOST_UPDATES]
    trajectory = Trajectory(batches, seed)
    try:
        run = partial(_run, trajectory, build, queues)
        expected, seconds = run(queues.synchronize)
        # Without this comparison, an unreproducible step would look like a race.
        repeated, _ = run(queues.synchronize)
        difference = _first_difference(expected, repeated)
        if difference is not None:
            return _unrepeatable(contract, difference)
        delay = min(max(FEWEST_SECONDS, _STEPS_OF_DELAY * seconds), MOST_SECONDS)
        late = f"{1e3 * delay:.0f} ms late"
        paces: dict[str, Callable[[], object]] = {
            "the host does not wait for the device": lambda: None,
            f"the device is {late}": partial(queues.delay_main, delay),
            f"its side streams are {late}": partial(queues.delay_sides, delay),
        }
        for situation, pace in paces.items():
            frames, _ = run(pace)
            difference = _first_difference(expected, frames)
            if difference is not None:
                return _race(contract, situation, difference)
    except StepError as error:
        return error.verdict(contract, None)
    summary = f"{len(batches)} updates have the same bits when the device is late"
    evidence = {"updates": len(batches), "delay_s": delay}
    return Verdict(Outcome.PASS, contract, summary, evidence)


def _run(
    trajectory: Trajectory,
    build: Build,
    queues: DeviceQueues,
    pace: Callable[[], object],
) -> tuple[list[Frame], float]:
    """Makes all updates with a call before each.

    Returns:
        The results of every update and the state after the last, and the seconds of one update.
    """
    # Streams may be created when a subject is built, and later in its updates.
    with queues.note_side_queues():
        isolation = trajectory.isolated(build)
        copies = trajectory.copies()
        batches = [
            trajectory.prepare(isolation, update, copies)
            for update in trajectory.updates
        ]
        outputs: list[Any] = []

        def make_updates() -> None:
            # The main queue copies the outputs, as in a loop that logs them.
            outputs.extend(isolation.advance(_paced(batches, pace), clones))

        seconds = queues.seconds(make_updates)
    frames = [on_host(output_frame(output)) for output in outputs]
    return [*frames, _state(isolation)], seconds / len(batches)


def _paced(batches: Sequence[Any], pace: Callable[[], object]) -> Iterator[Any]:
    for batch in batches:
        pace()
        yield batch


def _state(isolation: Isolation) -> Frame:
    state: Frame = on_host(isolation.initial())
    return state


def _first_difference(
    expected: Sequence[Frame], frames: Sequence[Frame]
) -> Difference | None:
    updates = len(expected) - 1
    pairs = zip(expected, frames, strict=True)
    for number, (baseline, changed) in enumerate(pairs, start=1):
        locations = not_same_bits(baseline, changed)
        update = min(number, updates)
        difference = describe_first(update, baseline, changed, locations)
        if difference is not None:
            return difference
    return None


def _race(contract: str, situation: str, difference: Difference) -> Verdict:
    summary = (
        f"the result depends on when the device computes it: if {situation}, {difference}; "
        "wait for the stream or event that writes or reads this memory"
    )
    evidence = {"race": situation, "difference": difference.data()}
    return Verdict(Outcome.FAIL, contract, summary, evidence)


def _unrepeatable(contract: str, difference: Difference) -> Verdict:
    reason = "the change itself is not the same twice"
    summary = f"races cannot be found, because {reason}: {difference}"
    evidence = {"difference": difference.data()}
    return Verdict(Outcome.INCONCLUSIVE, contract, summary, evidence)
