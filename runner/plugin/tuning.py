"""Tuning choices: what the stages of a run have selected by measuring, and the record of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runner.system.tuning_machine import Machine, machine_differences

CHOICES = "choices"
MACHINE = "machine"
RETUNE = "search again with --retune"


class Setup(NamedTuple):
    """The conditions for which a choice was made.

    Attributes:
        machine: As ``tuning_machine`` returns it.
        choices: By kind of the stage and by key.
    """

    machine: Mapping[str, Any]
    choices: Mapping[str, Mapping[str, Any]]


def parse_tuning(values: object) -> Setup:
    """Reads what ``Tuning.data`` returned.

    Raises:
        ValueError: It has another form.
    """
    entries = values if isinstance(values, Mapping) else {}
    machine = entries.get(MACHINE)
    choices = entries.get(CHOICES)
    if not isinstance(machine, Mapping) or not isinstance(choices, Mapping):
        raise ValueError(
            f"should be a mapping with '{MACHINE}' and '{CHOICES}', got {values!r:.60}"
        )
    for kind, of_stage in choices.items():
        if not isinstance(of_stage, Mapping) or not all(
            isinstance(key, str) for key in of_stage
        ):
            raise ValueError(
                f"{CHOICES}.{kind} should be a mapping, got {of_stage!r:.60}"
            )
    return Setup(machine, choices)


def machine_refusal(setup: Setup, machine: Mapping[str, Any], where: str) -> str | None:
    """Returns why choices are not valid on a machine; None if they are, or if there are none."""
    differences = machine_differences(setup.machine, machine)
    if not differences or not setup.choices:
        return None
    kinds = ", ".join(setup.choices)
    return f"{where}: the choices of {kinds} were made with {'; '.join(differences)}: {RETUNE}"


@dataclass
class Tuning:
    """The tuning choices of one pipeline.

    Attributes:
        machine: The machine on which the pipeline runs.
        is_fresh: Whether no choice of an earlier process may be used, as in the timed processes of
            an ablation.
        searches: Whether stages may search; otherwise what is not recorded stays at its default.
        revision: Changes when choices come from a lock or a checkpoint.
    """

    machine: Machine
    is_fresh: bool = False
    searches: bool = True
    _choices: dict[str, dict[str, Any]] = field(default_factory=dict)
    _locked: frozenset[tuple[str, str]] = frozenset()
    _listener: Callable[[dict[str, Any]], object] | None = None
    is_changed: bool = False
    revision: int = 0

    def of(self, kind: str) -> Choices:
        """Returns the choices of one stage."""
        return Choices(self, kind)

    def lock(self, choices: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes over choices that no checkpoint may replace."""
        self._choices = {kind: dict(of_stage) for kind, of_stage in choices.items()}
        self._locked = frozenset(
            (kind, key) for kind, of_stage in choices.items() for key in of_stage
        )
        self.revision += 1

    def data(self) -> dict[str, Any]:
        """Returns the choices with their machine as plain values; nothing if there are none."""
        if not self._choices:
            return {}
        choices = {kind: dict(of_stage) for kind, of_stage in self._choices.items()}
        return {MACHINE: dict(self.machine), CHOICES: choices}

    def restore(
        self, data: Mapping[str, Any], fixed: frozenset[str] = frozenset()
    ) -> None:
        """Takes over the choices of a checkpoint, except where a lock has others.

        Args:
            data: What ``data`` returned when the checkpoint was written.
            fixed: Kinds of stages whose choices cannot change after the first update. The others
                are skipped if this pipeline searches again.

        Choices of another machine are skipped, too.

        Raises:
            ValueError: The choices have another form.
        """
        if not data:
            return
        setup = parse_tuning(data)
        # What was the fastest on one machine may not be on another.
        is_foreign = bool(machine_differences(setup.machine, self.machine))
        for kind, of_stage in setup.choices.items():
            if kind not in fixed and (self.is_fresh or is_foreign):
                continue
            choices = self._choices.setdefault(kind, {})
            choices |= {
                key: value
                for key, value in of_stage.items()
                if (kind, key) not in self._locked
            }
        self.revision += 1

    def listen(self, listener: Callable[[dict[str, Any]], object]) -> None:
        """Sets what ``commit`` passes the choices to."""
        self._listener = listener

    def commit(self) -> None:
        """Makes choices durable that were recorded since the last call."""
        if self.is_changed and self._listener is not None:
            self._listener(self.data())
            self.is_changed = False

    def get(self, kind: str, key: str) -> Any:
        """Returns a choice; None if there is none."""
        return self._choices.get(kind, {}).get(key)

    def record(self, kind: str, key: str, value: Any) -> None:
        """Records a choice."""
        self._choices.setdefault(kind, {})[key] = value
        self.is_changed = True


@dataclass(frozen=True)
class Choices:
    """The tuning choices of one stage in one run.

    A stage records what it has selected by measuring. The record is a part of the run: its lock and
    its checkpoints contain it, and a run that is resumed, or a run of the lock, gets the same
    choices without a search.

    Attributes:
        tuning: The choices of all stages.
        kind: Kind of the stage.
    """

    tuning: Tuning
    kind: str

    @property
    def machine(self) -> Machine:
        """Processor, threads, device and versions that the choices depend on."""
        return self.tuning.machine

    @property
    def is_fresh(self) -> bool:
        """Returns whether no choice of an earlier process may be used, as in the timed
        processes of an ablation.
        """
        return self.tuning.is_fresh

    @property
    def searches(self) -> bool:
        """Returns whether the stage may search. If not, what has no choice stays at its default."""
        return self.tuning.searches

    @property
    def revision(self) -> int:
        """A number that changes when choices come from a lock or a checkpoint."""
        return self.tuning.revision

    def get(self, key: str) -> Any:
        """Returns the choice of that key; None if nothing was selected yet."""
        return self.tuning.get(self.kind, key)

    def items(self) -> dict[str, Any]:
        """Returns all choices of the stage, by key."""
        return dict(self.tuning.data().get(CHOICES, {}).get(self.kind, {}))

    def record(self, key: str, value: Any) -> None:
        """Records a choice.

        Args:
            key: Identifies what was selected, among the choices of this stage.
            value: The choice: a value that JSON can hold.
        """
        self.tuning.record(self.kind, key, value)

    def select(self, key: str, search: Callable[[], Any]) -> Any:
        """Returns the choice of that key, and searches for it if there is none."""
        choice = self.get(key)
        if choice is None:
            choice = search()
            self.record(key, choice)
        return choice
