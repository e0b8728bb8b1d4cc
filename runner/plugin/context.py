"""The environment in which learners and sources are built, including the named steps that stages
may replace or wrap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from runner.plugin.progress import Progress

if TYPE_CHECKING:
    import torch

    from runner.plugin.media import MediaLog
    from runner.plugin.optimizer import OptimizerSettings

Step = Callable[..., Any]
Value = TypeVar("Value")
STEP = frozenset({"draw", "transfer", "next_batch", "update"})
"""The slots of a training step."""
PROCESSES = frozenset({"sum_gradients"})
"""The slots of a training on several processes alone."""
PIPELINE = STEP | {
    "make_optimizer",
    "precision",
    "zero_grad",
    "backward",
    "unscale",
    "clip",
    "optimizer_step",
}
"""The slots of every pipeline: those of its step, and those that every learner uses."""
_WRAPPED = "_wraps_a_slot"
_SMALL_BYTES = 2**16
"""Below this size, the previous output of a recorded slot may stay until the next one exists."""


class Slots:
    """The steps of one pipeline, called as attributes: ``slots.critic_step(batch, targets)``.

    Steps are plain instance attributes, so that a call costs one look-up and ``torch.compile`` can
    trace through it.
    """

    def __getattr__(self, name: str) -> Step:
        names = ", ".join(sorted(vars(self)))
        raise AttributeError(f"no slot '{name}'; the pipeline has: {names}")

    def define(self, **steps: Step) -> None:
        """Adds steps under their names; a name that is taken is a ValueError."""
        for name in steps.keys() & vars(self).keys():
            raise ValueError(f"slot '{name}' is defined twice")
        vars(self).update(steps)

    def replace(self, name: str, step: Step) -> None:
        """Puts ``step`` in the place of an existing one; one that is wrapped already is a
        ValueError.
        """
        if hasattr(getattr(self, name), _WRAPPED):
            problem = "is wrapped already: replacing it would discard the wrapper"
            raise ValueError(f"slot '{name}' {problem}")
        setattr(self, name, step)

    def wrap(self, name: str, wrapper: Callable[[Step], Step]) -> None:
        """Replaces a step by ``wrapper(step)``, a function."""
        # The mark makes ``replace`` refuse a wrapped step.
        wrapped = wrapper(getattr(self, name))
        setattr(wrapped, _WRAPPED, True)
        setattr(self, name, wrapped)

    def record(
        self, name: str, outputs: dict[str, Any], *, is_traced: bool = False
    ) -> None:
        """Keeps the last output of a step in a dictionary.

        Args:
            name: The step, and the key of its output.
            outputs: Receives the output.
            is_traced: Whether a stage compiles steps. What a compiled graph returns is not kept,
                because a CUDA graph overwrites it.
        """
        from torch import Tensor, compiler

        def wrapper(step: Step) -> Step:
            is_small = False

            def recorded(*inputs: Any, **options: Any) -> Any:
                nonlocal is_small
                # The logits of a large vocabulary should not be in memory twice.
                if not is_small:
                    outputs.pop(name, None)
                output = outputs[name] = step(*inputs, **options)
                is_small = isinstance(output, Tensor) and output.nbytes < _SMALL_BYTES
                return output

            def recorded_unless_traced(*inputs: Any, **options: Any) -> Any:
                if compiler.is_compiling():
                    return step(*inputs, **options)
                return recorded(*inputs, **options)

            # A call of the compiler in every update takes as long as recording.
            return recorded_unless_traced if is_traced else recorded

        self.wrap(name, wrapper)

    def surround(
        self, name: str, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Runs a step in a context, except where ``torch.compile`` traces it.

        A context takes several times as long as a call: ``wrap`` is for slots of every update.

        Args:
            name: The step.
            context: Returns the context of a call.
        """
        from torch import compiler

        def wrapper(step: Step) -> Step:
            def surrounded(*inputs: Any, **options: Any) -> Any:
                # A context would break a compiled graph in two.
                if compiler.is_compiling():
                    return step(*inputs, **options)
                with context():
                    return step(*inputs, **options)

            return surrounded

        self.wrap(name, wrapper)


class Processes(Protocol):
    """The processes of one training, as one of them sees them.

    Attributes:
        rank: Number of this process, from 0.
        count: Number of processes.
    """

    rank: int
    count: int

    def gather(self, value: Value) -> list[Value]:
        """Returns the values of all processes, by rank; all have to call it."""

    def decide(self, make: Callable[[], Value]) -> Value:
        """Returns what the first process makes, a value in JSON; the others wait for it."""

    def sum_in_place(self, tensor: torch.Tensor) -> None:
        """Replaces a tensor by its sum over all processes; all have to call it."""

    def min_in_place(self, tensor: torch.Tensor) -> None:
        """Replaces elements of a tensor by the smallest of all processes; all have to call it."""


@dataclass
class Context:
    """Device, slots, settings that belong to no plugin, and random generators."""

    device: torch.device
    slots: Slots
    seed: int
    batch_size: int = 1
    """Batch size of the recipe; a stage may train with another one."""
    optimizers: Mapping[str, OptimizerSettings] = field(default_factory=dict)
    """Settings of the optimizers, by role."""
    ema: float | None = None
    """Decay of the averaged parameters that evaluation uses; None evaluates the parameters
    themselves.
    """
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the source's data in addition to shapes (number of classes, size of the
    vocabulary).
    """
    tables: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further data as tensors (scales of targets, dimensions of a machine)."""
    class_weights: torch.Tensor | None = None
    """Weight of each class in the training's loss [classes], on ``device``; None weights all
    samples equally.
    """
    sample_losses: bool = False
    """Whether the source selects samples by their losses, which an update then returns."""
    classes: tuple[str, ...] = ()
    """Names of the labels, as ``Source.classes``; empty if the data have none."""
    progress: Progress = field(default_factory=lambda: Progress("updates", 1))
    """Current progress of the training. Evaluation reads it, because ``metrics`` takes only a
    batch.
    """
    generators: dict[str, torch.Generator] = field(default_factory=dict)
    processes: Processes | None = None
    """The processes of the training if there are several. They draw the same batches, or parts of
    them: ``SourceConfig.division``.
    """
    overfit_batches: int | None = None
    """Number of batches that a training repeats; None trains on all data."""
    media: MediaLog | None = None
    """Takes what is logged below; None discards it, as where updates are compared or timed."""

    def log_figure(self, name: str, figure: Any) -> None:
        """Keeps a figure of matplotlib as ``media/<name>/<progress>.png`` of the run."""
        self._log(name, ".png", figure.savefig)

    def log_image(self, name: str, image: Any) -> None:
        """Keeps a picture: (height, width), or with 1, 3 or 4 channels before or after these;
        floating-point numbers are from 0 to 1, integers from 0 to 255.
        """
        from runner.plugin.media import write_image

        self._log(name, ".png", partial(write_image, image))

    def log_text(self, name: str, text: str) -> None:
        """Keeps a text."""
        self._log(name, ".txt", lambda path: path.write_text(text, encoding="utf-8"))

    def log_table(
        self, name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
    ) -> None:
        """Keeps a table as CSV."""
        from runner.plugin.media import write_table

        self._log(name, ".csv", partial(write_table, columns, rows))

    def _log(self, name: str, ending: str, write: Callable[[Path], object]) -> None:
        if self.media is not None:
            self.media.write(name, ending, write)

    def generator(
        self, name: str, device: torch.device | str | None = None
    ) -> torch.Generator:
        """Returns the random generator of that name ("noise", "environment", ...), which is the
        same for every call.

        The same seed, name and device give the same numbers; the default device is the context's.
        """
        return self._generator(name, device, name)

    def process_generator(
        self, name: str, device: torch.device | str | None = None
    ) -> torch.Generator:
        """Returns the generator of that name, which gives other numbers in each process.

        A source that draws parts of batches (``SourceConfig.division``) draws from it. A single
        process gets that of ``generator``.
        """
        if self.processes is None:
            return self.generator(name, device)
        return self._generator(name, device, f"{name}/process {self.processes.rank}")

    def process_part(self, count: int) -> int:
        """Returns how many of ``count`` things are this process's; parts differ by one at most."""
        processes = self.processes
        if processes is None:
            return count
        start = processes.rank * count // processes.count
        return (processes.rank + 1) * count // processes.count - start

    def sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum of a tensor over all processes, which all have to call it."""
        if self.processes is None:
            return tensor
        total = tensor.clone()
        self.processes.sum_in_place(total)
        return total

    def min_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the smallest elements of all processes, which all have to call it."""
        if self.processes is None:
            return tensor
        smallest = tensor.clone()
        self.processes.min_in_place(smallest)
        return smallest

    def _generator(
        self, name: str, device: torch.device | str | None, seed_name: str
    ) -> torch.Generator:
        import torch

        if name not in self.generators:
            generator = torch.Generator(self.device if device is None else device)
            generator.manual_seed(derived_seed(self.seed, seed_name))
            self.generators[name] = generator
        return self.generators[name]


def derived_seed(seed: int, name: str) -> int:
    """Returns a seed of 63 bits that follows from another one and a name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
