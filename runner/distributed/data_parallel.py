"""Divides the updates of one training among several processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from runner.distributed.random_rows import RandomRows, uneven
from runner.distributed.reduction import ResultSums, sum_gradients
from runner.plugin.end_training import EndTraining
from runner.system.errors import RunnerError, UsageError
from runner.system.suggestions import method_named
from runner.system.tensor_trees import summable, tensors

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from runner.distributed.process_group import ProcessGroup
    from runner.plugin.context import Slots
    from runner.plugin.learner import Learner
    from runner.plugin.progress import Progress
    from runner.plugin.source import Batch, Source
    from runner.recipe.recipe import Recipe

STOP_SIGNALS = (1, 2, 15)
"""SIGHUP, SIGINT and SIGTERM: each has a vote in an update."""


class Parallelized(Protocol):
    """The pipeline whose updates are divided."""

    recipe: Recipe
    slots: Slots
    learner: Learner
    source: Source
    device: torch.device


class BatchPart(NamedTuple):
    """The samples of a process in an update.

    Attributes:
        batch: Its samples.
        noise: Their random numbers.
        rows: Their numbers among the samples of all processes.
        size: Number of samples of all processes.
    """

    batch: Batch
    noise: Batch
    rows: slice
    size: int


class DataParallel:
    """Lets every process compute the gradient of a part of each batch.

    Every process draws the same batches and random numbers as a single process. An update takes
    the rows of the process, also of the random numbers that it draws itself (dropout); gradients
    are added up before they are clipped, once for each step of an optimizer. Losses are divided by
    the count of the entire batch, so that the sum is the gradient of a single process.

    Args:
        group: The processes.
        pipeline: An assembled pipeline, with all stages.
    """

    def __init__(self, group: ProcessGroup, pipeline: Parallelized) -> None:
        self.group = group
        self.learner = pipeline.learner
        self.source = pipeline.source
        self.slots = pipeline.slots
        self.device = pipeline.device
        config = pipeline.learner.config
        self.sums_counts = "forward_backward" in vars(pipeline.slots)
        self.averages_buffers = config.buffer_rule == "average"
        owner = type(pipeline.learner).__name__
        self.results = ResultSums(group, pipeline.device, owner)
        # Of the current update: share of the samples, optimizers with complete gradients, and
        # whether a loss was divided by a count of all processes.
        self.share = 1.0
        self.summed: set[int] = set()
        self.is_inside_loss = False
        self.has_loss = False
        self.updates = 0
        self.random_rows: RandomRows | None = None
        if config.draws():
            self.random_rows = RandomRows(pipeline.learner.modules(), config.kind)
        self._generator = torch.default_generator
        if pipeline.device.type == "cuda":
            index = pipeline.device.index or 0
            self._generator = torch.cuda.default_generators[index]

    def attach(self) -> None:
        """Wraps the slots of the pipeline.

        Raises:
            UsageError: The learner cannot be trained on parts of a batch.
            RunnerError: The initial parameters differ between processes.
        """
        self._refuse_learner()
        self.slots.wrap("update", self._wrap_update)
        self.slots.wrap("unscale", self._wrap_unscale)
        self.slots.wrap("optimizer_step", self._wrap_step)
        self.slots.wrap("backward", self._wrap_backward)
        if self.sums_counts:
            self.slots.wrap("forward_backward", self._wrap_loss)
        self._require_equal_parameters(
            f"the initial parameters of {type(self.learner).__name__} differ between processes; "
            "draw them with a generator of the context, or in build(), which is seeded"
        )

    def _refuse_learner(self) -> None:
        """Raises a UsageError if the model of parts of a batch is another one."""
        config = self.learner.config
        modules = self.learner.modules().values()
        layers = [layer for module in modules for layer in module.modules()]
        is_coupled = any(isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm) for layer in layers)
        if is_coupled:
            raise UsageError(
                f"model: '{config.kind}' has batch normalisation, which would see the samples of "
                "one process; switch optimization.synchronized_batch_norm on, or use another normalisation"
            )
        if self.sums_counts or config.losses_are_means:
            return
        name = type(config).__name__
        raise UsageError(
            f"model: '{config.kind}' does not declare how losses of parts of a batch add up: "
            "compute them in a slot forward_backward that divides a Loss by its count, or set "
            f"{name}.losses_are_means"
        )

    # --- slots ------------------------------------------------------------------------

    def _wrap_update(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def update(batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
            return self.update(step, batch, noise, progress)

        return update

    def update(self, step: Callable[..., Any], batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        """Performs an update on this process's part of a batch.

        Returns:
            The results of the entire batch.
        """
        part = self._divide(batch, noise, progress)
        self._begin(batch)
        self.share = (part.rows.stop - part.rows.start) / part.size
        try:
            with self._drawing(part.size, part.rows):
                output: Any = step(part.batch, part.noise, progress)
        except EndTraining as ended:
            method = method_named(self.learner, "update")
            problem = "cannot end a training on several processes"
            raise RunnerError(f"{method}: EndTraining in an update {problem}") from ended
        self._equalize_buffers()
        # The step reports other results than dictionaries.
        return self._added_up(output) if isinstance(output, dict) else output

    def _divide(self, batch: Batch, noise: Batch, progress: Progress) -> BatchPart:
        """Returns the part of this process in a batch that all processes have drawn."""
        size = self.source.size(batch)
        rows = self.rows(size)
        # After 0, 1, 2, 4, ... updates of the training, resumed or not.
        if self.random_rows is not None and progress.updates & (progress.updates - 1) == 0:
            rows = uneven(rows, size, self.group.rank, self.group.count)
        part = self.source.take(batch, rows)
        return BatchPart(part, self._noise_of(noise, rows, size), rows, size)

    def counts(self, batch: Batch | None) -> Mapping[str, int]:
        """Returns what an update on a batch adds to the progress of all processes."""
        return self.source.counts(batch)

    def rows(self, size: int) -> slice:
        """Returns the rows of this process in a batch of that size."""
        return self.group.rows(size)

    @contextmanager
    def _drawing(self, size: int, rows: slice) -> Iterator[None]:
        """Lets an update draw the random numbers of its rows, if its settings declare that."""
        if self.random_rows is not None:
            with self.random_rows.of(size, rows):
                yield
            return
        state = self._generator.get_state()
        yield
        if not torch.equal(state, self._generator.get_state()):
            self._refuse_draws()

    def _wrap_loss(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Divides losses by the count of the entire batch."""

        def forward_backward(batch: Batch, noise: Batch, progress: Progress, **options: Any) -> Any:
            if "denominator" in options:
                method = method_named(self.learner, "update")
                raise RunnerError(
                    f"{method} passes a denominator to forward_backward, which several processes "
                    "cannot do; use gradient_accumulation to cut a batch"
                )
            self.is_inside_loss = True
            try:
                return step(batch, noise, progress, denominator=self.total_count, **options)
            finally:
                self.is_inside_loss = False

        return forward_backward

    def total_count(self, count: Any) -> Any:
        """Returns the count of all processes for that of this one, at least 1 unless it is a
        fraction.
        """
        self.has_loss = True
        if isinstance(count, Tensor):
            total = summable(count.detach()).clone()
            self.group.sum_in_place(total)
            # A count of zero belongs to a gradient of zero.
            return total.masked_fill(total == 0, 1)
        number = torch.tensor(float(count), dtype=torch.float64, device=self.device)
        self.group.sum_in_place(number)
        return number.item() or 1.0

    def _wrap_backward(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Weights losses that are means over samples with the share of the samples."""

        def backward(loss: Tensor) -> Any:
            if self.is_inside_loss:
                return step(loss)
            if not self.learner.config.losses_are_means:
                self._refuse_loss()
            self.has_loss = True
            return step(loss * self.share)

        return backward

    def _wrap_unscale(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def unscale(optimizer: Optimizer) -> Any:
            self.sum_gradients(optimizer)
            return step(optimizer)

        return unscale

    def _wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def optimizer_step(optimizer: Optimizer) -> Any:
            self.sum_gradients(optimizer)
            # Another step in the same update has other gradients.
            self.summed.discard(id(optimizer))
            return step(optimizer)

        return optimizer_step

    def sum_gradients(self, optimizer: Optimizer) -> None:
        """Adds up the gradients of an optimizer over all processes, once for each step."""
        if id(optimizer) in self.summed:
            return
        if not self.has_loss:
            self._refuse_loss()
        self.summed.add(id(optimizer))
        groups = optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        trained = [parameter for parameter in self._whole(parameters) if parameter.requires_grad]
        if trained:
            sum_gradients(trained, self.group, self.slots.sum_gradients)

    # --- before and after an update ---------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        self.summed.clear()
        self.has_loss = False
        # Ever more rarely, because it reads all parameters: after 0, 1, 2, 4, 8 updates.
        is_check_due = self.updates & (self.updates - 1) == 0
        self.updates += 1
        if not is_check_due:
            return
        self._require_equal_parameters(
            "the parameters of the processes have become different: "
            f"{type(self.learner).__name__} steps an optimizer past the slot optimizer_step, "
            "or computes something else in each process"
        )
        self._check_batches(batch)

    def _check_batches(self, batch: Batch) -> None:
        """Raises a RunnerError if the processes have drawn different batches."""
        source = type(self.source).__name__
        self.group.require_equal(
            digest_of(tensors(batch)),
            f"{source} draws other batches in each process; draw them from the recipe's seed",
        )

    def _noise_of(self, noise: Batch, rows: slice, size: int) -> Batch:
        """Returns the random numbers of this process's samples."""
        try:
            return self.learner.noise_layout.take(noise, rows, size)
        except ValueError as error:
            owner = type(self.learner).__name__
            raise RunnerError(
                f"the noise of {owner} cannot be divided among processes: {error}; name entries "
                f"of the entire batch in {owner}.noise_layout = BatchLayout(shared={{...}})"
            ) from None

    def _added_up(self, output: dict[str, Any]) -> dict[str, Any]:
        """Returns the results of the entire batch, and counts the votes for a stop."""
        votes = self._votes()
        fingerprint = 0.0
        if self.random_rows is not None:
            fingerprint = self.random_rows.fingerprint(self._generator)
            votes += [fingerprint, fingerprint**2]
        rows = self._rows_of_results(output)
        scalars = {name: value for name, value in output.items() if name not in rows}
        results, counts = self.results.add_up(scalars, self.share, votes)
        if self.random_rows is not None:
            *counts, total, total_of_squares = counts
            # The variance over the processes; the numbers are exact.
            if self.group.count * total_of_squares != total**2:
                self._refuse_other_draws()
        self._count_votes(counts)
        return results | rows

    def _votes(self) -> list[float]:
        """Returns 1 for the signal that this process has received, and 0 for all others."""
        return [float(self.group.vote.pending == number) for number in STOP_SIGNALS]

    def _count_votes(self, counts: Sequence[float]) -> None:
        """Stops all processes at a signal that one of them has received."""
        vote = self.group.vote
        for number, count in zip(STOP_SIGNALS, counts, strict=True):
            if count and not vote.agreed:
                vote.agreed = number

    def _rows_of_results(self, output: dict[str, Any]) -> dict[str, Tensor]:
        """Returns the results with one row per sample, which nothing adds up: none here."""
        return {}

    def _equalize_buffers(self) -> None:
        """Gives all processes the same buffers: those of the first one, or their means."""
        modules = self.learner.modules().values()
        buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}
        for buffer in buffers.values():
            if self.averages_buffers and buffer.is_floating_point():
                with torch.no_grad():
                    buffer.mul_(self.share)
                self.group.sum_in_place(buffer)
            else:
                self.group.copy_first(buffer)

    def _require_equal_parameters(self, problem: str) -> None:
        parameters = (parameter for _, parameter in self.learner.named_parameters())
        self.group.require_equal(digest_of(self._whole(parameters)), problem)

    def _whole(self, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yields the parameters of which every process has all numbers."""
        sharding = self.learner.sharding
        for parameter in parameters:
            if sharding is None or not sharding.is_divided(parameter):
                yield parameter

    def _refuse_draws(self) -> None:
        config = self.learner.config
        raise RunnerError(
            f"model: an update of '{config.kind}' draws random numbers (dropout), which would be "
            f"others in parts of a batch; declare it by {type(config).__name__}.draws(), draw them "
            "in noise(), or switch them off"
        )

    def _refuse_other_draws(self) -> None:
        kind = self.learner.config.kind
        raise RunnerError(
            f"model: updates of '{kind}' draw random numbers (dropout) of different shapes in each "
            "process, such as those of differently padded samples; draw them in noise(), set the "
            f"dropout of '{kind}' to 0, or use one process"
        )

    def _refuse_loss(self) -> None:
        method = method_named(self.learner, "update")
        raise RunnerError(
            f"{method} computes a gradient past the slots forward_backward and backward, so "
            "several processes cannot weight it"
        )


def digest_of(values: Iterable[Tensor]) -> bytes:
    """Returns a digest of the bits of tensors."""
    content = hashlib.sha1(usedforsecurity=False)
    for value in values:
        dense = value.detach().cpu().contiguous().reshape(-1)
        content.update(dense.view(torch.uint8).numpy().data)
    return content.digest()
