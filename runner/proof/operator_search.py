"""Searches the operators of two updates for the first one that diverges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from runner.proof.difference import digest
from runner.proof.operators import READ, TRUSTED, CallSite, Operator, OperatorRecorder
from runner.proof.values import Match, Value, ValueTable
from runner.system.stored_json import json_number
from runner.system.tensor_trees import as_float64


@dataclass(frozen=True)
class DivergingOperator:
    """The first operator that diverges.

    Attributes:
        operator: Such as ``aten.addmm``.
        module: Dotted path of the module that called it, or the optimizer's class; may be empty.
        phase: ``forward``, ``backward`` or ``optimizer step``.
        number: Its position among the operators of the update, from 1.
        count: Operators of the update.
        remark: A difference from the baseline's operator in addition to the value.
        baseline: Element of the baseline's value that differs most; None without such a value.
        candidate: The same of the candidate.
        float64: The same of the baseline in float64; None if it was not computed.
    """

    operator: str
    module: str
    phase: str
    number: int
    count: int
    remark: str = ""
    baseline: float | None = None
    candidate: float | None = None
    float64: float | None = None

    def __str__(self) -> str:
        site = CallSite(self.module, self.phase)
        position = f"{self.number:,} of {self.count:,}"
        text = f"first diverging operator: {self.operator} in the {site} ({position})"
        if self.remark:
            text += f", {self.remark}"
        if self.candidate is not None and self.baseline is not None:
            text += f": {self.candidate:.8g} instead of {self.baseline:.8g}"
        if self.float64 is not None:
            text += f", {self.float64:.8g} in float64"
        return text

    def data(self) -> dict[str, Any]:
        """Returns it as JSON can store it."""
        return {name: json_number(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Recording:
    """The operators of an update and the tensors that it left.

    Attributes:
        recorder: Has the operators.
        tensors: What the update returned and the state after it, by dotted path.
        start: The state before it.
    """

    recorder: OperatorRecorder
    tensors: dict[str, Any]
    start: dict[str, Any]

    @property
    def operators(self) -> list[Operator]:
        """Returns the operators in the order in which they ran."""
        return self.recorder.operators

    def origins(self, names: Sequence[str]) -> list[int]:
        """Returns the positions of the operators that wrote these tensors last."""
        positions = []
        for name in names:
            tensor = self.tensors.get(name)
            if isinstance(tensor, Tensor):
                position = self.recorder.producer_of(tensor)
                if position is not None:
                    positions.append(position)
        return positions


class Compared(NamedTuple):
    """An element of the baseline with which the candidate's was compared."""

    position: int
    output: int
    element: int


class OperatorSearch:
    """The search for the first operator of a candidate that diverges.

    Args:
        table: The values of the baseline.
        reference: The baseline's operators.
        candidate: The candidate's.
    """

    def __init__(
        self, table: ValueTable, reference: Recording, candidate: Recording
    ) -> None:
        self._table = table
        self._reference = reference
        self._candidate = candidate
        candidate.recorder.drop_incomplete_rows()
        self.compared: Compared | None = None
        """The baseline's element that the result has."""
        self._claimed: set[int] = set()
        for operator in candidate.operators:
            self._claimed.update(_numbers(operator.outputs))
            self._claimed.update(_numbers(operator.inputs))

    def first(self) -> DivergingOperator | str:
        """Returns the operator, or a sentence with the reason why none is named."""
        operators = self._candidate.operators
        if not operators and not self._reference.operators:
            return "no operator of torch runs in the update that diverges"
        names = self._differing_values()
        if not names:
            reason = "the difference does not come again when operators are recorded one by one"
            return f"{reason}{self._last_common}"
        position = self._first_unmatched(names)
        if position is not None:
            return self._describe(operators[position], position)
        recorders = (self._candidate.recorder, self._reference.recorder)
        if not all(recorder.is_complete for recorder in recorders):
            first = f"no operator among the first {len(operators):,} diverges"
            return f"{first}; more did not fit into memory or time"
        missing = self._first_missing(names)
        # An operator that is called less often explains more than a value without effect.
        if missing is not None and self._is_rarer(missing):
            return self._describe_missing(missing)
        unmatched = self._first_without_effect()
        if unmatched is not None:
            return self._describe(operators[unmatched], unmatched)
        if missing is not None:
            return self._describe_missing(missing)
        reason = f"'{names[0]}' is changed outside of torch's operators"
        return f"no operator diverges: {reason}{self._last_common}"

    def _differing_values(self) -> list[str]:
        """Returns the names of tensors and numbers that differ after the update."""
        tensors = self._candidate.tensors
        return [
            name
            for name, expected in self._reference.tensors.items()
            if not self._is_same(expected, tensors.get(name))
        ]

    def _is_same(self, expected: Any, actual: Any) -> bool:
        if isinstance(expected, float) and isinstance(actual, float):
            expected, actual = map(as_float64, (expected, actual))
        if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
            return digest(expected) == digest(actual)
        table = ValueTable(self._table.tolerance)
        number = table.add(Value.of(expected))
        return table.equals(number, Value.of(actual)) and expected.dtype == actual.dtype

    def _first_unmatched(self, names: Sequence[str]) -> int | None:
        """Returns the earliest operator on which differing values depend through values that
        are not the baseline's.

        A number that Python reads has no tensor; it is followed if no tensor can be.
        """
        operators = self._candidate.operators
        origins = self._candidate.origins(names)
        if all(operators[position].is_matched for position in origins):
            origins = []
            for operator in operators:
                if operator.name == READ:
                    origins += _present(operator.producers)
        excused = self._excused()

        def is_common(operator: Operator) -> bool:
            return operator.is_matched or id(operator) in excused

        positions = _uncommon(operators, origins, is_common)
        if not positions:
            # The operators that are excused are the only ones that differ.
            positions = _uncommon(
                operators, origins, lambda operator: operator.is_matched
            )
        return min(positions, default=None)

    def _excused(self) -> set[int]:
        """Returns the operators whose values are not the baseline's, although something
        computed from them is.

        A change may concatenate tensors for one product, and use them again in the backward pass.
        """
        operators = self._candidate.operators
        excused = set()
        blamed = set()
        for operator in operators:
            producers = [
                operators[position] for position in _present(operator.producers)
            ]
            unmatched = {
                id(producer) for producer in producers if not producer.is_matched
            }
            if operator.is_matched and operator.reads_content:
                excused |= unmatched
                continue
            # Nothing else explains such a value; a sum of reversed rows excuses nothing.
            is_explained = len(unmatched) == 1 and not operator.is_view
            if is_explained and not operator.is_matched:
                blamed |= unmatched
        return excused - blamed

    def _first_without_effect(self) -> int | None:
        """Returns the earliest operator with another value although its effect is overwritten
        later.

        Clipping hides a factor of all gradients.
        """
        excused = self._excused()
        for position, operator in enumerate(self._candidate.operators):
            if not operator.is_matched and id(operator) not in excused:
                return position
        return None

    def _is_rarer(self, position: int) -> bool:
        """Returns whether the candidate calls an operator of the baseline less often."""
        name = self._reference.operators[position].name
        count = sum(operator.name == name for operator in self._candidate.operators)
        return count < sum(
            operator.name == name for operator in self._reference.operators
        )

    def _first_missing(self, names: Sequence[str]) -> int | None:
        """Returns the earliest operator of the baseline whose values the candidate needs and
        never computes.
        """
        origins = self._reference.origins(names)
        positions = _uncommon(self._reference.operators, origins, self._is_claimed)
        return min(positions, default=None)

    def _is_claimed(self, operator: Operator) -> bool:
        numbers = _numbers(operator.outputs)
        return all(
            number in self._claimed or number == TRUSTED.number for number in numbers
        )

    def _describe(self, operator: Operator, position: int) -> DivergingOperator:
        operators = self._candidate.operators
        if operator.changed_input is not None:
            producer = operators[operator.changed_input]
            remark = "whose output is changed afterwards by no operator of torch"
            return _named(producer, operator.changed_input, len(operators), remark)
        description = _named(operator, position, len(operators), "")
        counterpart = self._counterpart(operator, has_name=True)
        if counterpart is not None and operator.foreign_shape is not None:
            shape = f"an input of shape {operator.foreign_shape}"
            remark = (
                f"with {shape} that existed before the update and is not the baseline's"
            )
            description = replace(description, remark=remark)
            return self._with_values(description, operator, counterpart)
        if counterpart is not None and not self._has_other_input(operator, counterpart):
            return self._with_values(description, operator, counterpart)
        additional = replace(description, remark="which the baseline does not have")
        if self._is_additional(operator, position):
            reference = self._like_an_input(operator)
            return self._with_values(additional, operator, reference)
        missing = self._missing_before(operator)
        if missing is not None and not self._is_rarer(missing):
            missing = None
        replaced = self._counterpart(operator, has_name=False)
        if replaced is not None and missing is None:
            name = self._reference.operators[replaced].name
            description = replace(description, remark=f"where the baseline has {name}")
            return self._with_values(description, operator, replaced)
        if missing is not None:
            return self._describe_missing(missing)
        if counterpart is None:
            return additional
        description = replace(description, remark="with another input")
        return self._with_values(description, operator, counterpart)

    def _describe_missing(self, position: int) -> DivergingOperator:
        operators = self._reference.operators
        remark = "which the baseline has, is left out"
        return _named(operators[position], position, len(operators), remark)

    def _counterpart(self, operator: Operator, *, has_name: bool) -> int | None:
        """Returns the position of the baseline's operator in whose place this one is.

        Args:
            operator: Of the candidate.
            has_name: Whether it is the same operator; another one must have the same inputs.
        """
        inputs = _inputs(operator)
        best = None
        most = 0.0
        for position, reference in enumerate(self._reference.operators):
            if reference.shapes != operator.shapes or self._is_claimed(reference):
                continue
            if (reference.name == operator.name) != has_name:
                continue
            expected = _inputs(reference)
            if has_name:
                is_likely = not inputs or bool(inputs & expected)
            else:
                is_likely = bool(inputs) and inputs == expected
            if not is_likely:
                continue
            # The same module decides between operators with equally many common inputs.
            common = len(inputs & expected) + 0.5 * (reference.site == operator.site)
            if best is None or common > most:
                most = common
                best = position
        return best

    def _has_other_input(self, operator: Operator, counterpart: int) -> bool:
        """Returns whether an input is another value than that of the baseline's operator."""
        expected = self._reference.operators[counterpart].inputs
        for match, expected_match in zip(operator.inputs, expected, strict=False):
            if match is None or expected_match is None:
                continue
            if match.number != expected_match.number:
                return True
            # The transpose of a square matrix is another input of the same shape.
            if match.is_permuted != expected_match.is_permuted:
                return True
        return False

    def _is_additional(self, operator: Operator, position: int) -> bool:
        """Returns whether the baseline gives an input of an operator directly to the next one."""
        followers = {
            follower.name
            for follower in self._candidate.operators
            if position in follower.producers
        }
        inputs = _inputs(operator)
        for reference in self._reference.operators:
            has_input = reference.name in followers and inputs & _inputs(reference)
            if has_input and not self._is_claimed(reference):
                return True
        return False

    def _missing_before(self, operator: Operator) -> int | None:
        """Returns the baseline's operator between an input of this one and the same operator
        of the baseline.
        """
        inputs = _inputs(operator)
        operators = self._reference.operators
        for reference in operators:
            is_same = (
                reference.name == operator.name and reference.site == operator.site
            )
            if not is_same or self._is_claimed(reference):
                continue
            producers = _present(reference.producers)
            between = _uncommon(operators, producers, self._is_claimed)
            # A constant of an operator that is left out is missing, too.
            with_input = [at for at in between if _inputs(operators[at]) & inputs]
            if with_input:
                return min(with_input)
        return None

    def _like_an_input(self, operator: Operator) -> int | None:
        """Returns the position at which the baseline has the input that an additional
        operator replaces.
        """
        numbers = _inputs(operator)
        for position, reference in enumerate(self._reference.operators):
            match = reference.outputs[0] if reference.outputs else None
            if match is None or match.number not in numbers:
                continue
            if reference.shapes[:1] == operator.shapes[:1]:
                return position
        return None

    def _with_values(
        self,
        description: DivergingOperator,
        operator: Operator,
        counterpart: int | None,
    ) -> DivergingOperator:
        """Returns the description with the element of both values that differs most."""
        if counterpart is None or None not in operator.outputs:
            return description
        output = operator.outputs.index(None)
        actual = operator.unmatched[output].numbers
        reference = self._reference.operators[counterpart]
        match = reference.outputs[output] if output < len(reference.outputs) else None
        if match is None or match == TRUSTED:
            return description
        expected = self._table.values[match.number].numbers
        if expected.shape != actual.shape or not expected.numel():
            return description
        is_same = (actual == expected) | (actual.isnan() & expected.isnan())
        distance = (actual - expected).abs().nan_to_num(nan=math.inf)
        element = int(distance.masked_fill(is_same, 0.0).argmax())
        self.compared = Compared(counterpart, output, element)
        return replace(
            description,
            baseline=float(expected[element]),
            candidate=float(actual[element]),
        )

    @property
    def _last_common(self) -> str:
        for operator in reversed(self._candidate.operators):
            if operator.is_matched and operator.name != READ:
                return f"; the last common operator is {operator.name} in the {operator.site}"
        return ""


def _present(positions: Sequence[int | None]) -> list[int]:
    return [position for position in positions if position is not None]


def _inputs(operator: Operator) -> set[int]:
    """Returns the numbers of the values that an operator reads."""
    return {
        match.number
        for match in operator.inputs
        if match is not None and match != TRUSTED
    }


def _numbers(matches: Sequence[Match | None]) -> Iterator[int]:
    """Yields the numbers of all values in matches."""
    for match in matches:
        if match is not None:
            yield match.number
            yield from match.pieces


def _uncommon(
    operators: Sequence[Operator],
    origins: Sequence[int],
    is_common: Callable[[Operator], bool],
) -> set[int]:
    """Follows operators backward as far as they are not common, and returns the positions
    of these.
    """
    pending = [position for position in origins if not is_common(operators[position])]
    visited = set(pending)
    while pending:
        producers = operators[pending.pop()].producers
        for position in producers:
            if (
                position is None
                or position in visited
                or is_common(operators[position])
            ):
                continue
            visited.add(position)
            pending.append(position)
    return visited


def _named(
    operator: Operator, position: int, count: int, remark: str
) -> DivergingOperator:
    return DivergingOperator(
        operator=operator.name,
        module=operator.site.module,
        phase=operator.site.phase,
        number=position + 1,
        count=count,
        remark=remark,
    )
