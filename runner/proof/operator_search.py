"""Searches the operators of two updates for the first one that diverges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.proof.difference import digest, plain
from runner.proof.operators import READ, TRUSTED, CallSite, Operator, OperatorRecorder
from runner.proof.values import Match, Value, ValueTable


@dataclass(frozen=True)
class DivergingOperator:
    """The first operator that diverges.

    Attributes:
        operator: Such as ``aten.addmm``.
        module: Dotted path of the module that called it, or the optimizer's class; may be empty.
        phase: ``forward``, ``backward`` or ``optimizer step``.
        number: Its position among the operators of the update, from 1.
        count: Operators of the update.
        remark: What distinguishes it from the baseline's operator, besides the value.
        baseline: Element of the baseline's value that differs most; None if there is no such value.
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
        place = CallSite(self.module, self.phase)
        text = f"first diverging operator: {self.operator} in the {place} ({self.number:,} of {self.count:,})"
        if self.remark:
            text += f", {self.remark}"
        if self.candidate is not None and self.baseline is not None:
            text += f": {self.candidate:.8g} instead of {self.baseline:.8g}"
        if self.float64 is not None:
            text += f", {self.float64:.8g} in float64"
        return text

    def data(self) -> dict[str, Any]:
        """Returns it as JSON can store it."""
        return {name: plain(value) for name, value in asdict(self).items()}


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
        """In the order in which they ran."""
        return self.recorder.operators

    def origins(self, names: Sequence[str]) -> list[int]:
        """Returns the positions of the operators that wrote these tensors last."""
        tensors = (self.tensors.get(name) for name in names)
        positions = (self.recorder.producer_of(tensor) for tensor in tensors if isinstance(tensor, Tensor))
        return [position for position in positions if position is not None]


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

    def __init__(self, table: ValueTable, reference: Recording, candidate: Recording) -> None:
        self._table = table
        self._reference = reference
        self._candidate = candidate
        candidate.recorder.drop_incomplete_rows()
        self.compared: Compared | None = None
        """The baseline's element that the result has."""
        matches = [match for operator in candidate.operators for match in (*operator.outputs, *operator.inputs)]
        self._claimed = {number for match in matches if match is not None for number in _numbers(match)}

    def first(self) -> DivergingOperator | str:
        """Returns the operator, or a sentence with the reason why none is named."""
        operators = self._candidate.operators
        if not operators and not self._reference.operators:
            return "no operator of torch runs in the update that diverges"
        names = self._differing_values()
        if not names:
            return f"the difference does not come again when operators are recorded one by one{self._last_common}"
        position = self._first_unmatched(names)
        if position is not None:
            return self._describe(operators[position], position)
        if not (self._candidate.recorder.is_complete and self._reference.recorder.is_complete):
            return f"no operator among the first {len(operators):,} diverges; more did not fit into memory or time"
        missing = self._first_missing(names)
        if missing is not None and self._is_rarer(self._reference.operators[missing].name):
            return self._describe_missing(missing)
        unmatched = self._first_without_effect()
        if unmatched is not None:
            return self._describe(operators[unmatched], unmatched)
        if missing is not None:
            return self._describe_missing(missing)
        return f"no operator diverges: '{names[0]}' is changed outside of torch's operators{self._last_common}"

    def _differing_values(self) -> list[str]:
        """Returns the names of tensors and numbers that differ after the update."""
        expected = self._reference.tensors
        values = self._candidate.tensors
        return [name for name, value in expected.items() if not self._is_same(value, values.get(name))]

    def _is_same(self, expected: Any, value: Any) -> bool:
        if isinstance(expected, float) and isinstance(value, float):
            expected, value = (torch.tensor(number, dtype=torch.float64) for number in (expected, value))
        if not isinstance(expected, Tensor) or not isinstance(value, Tensor):
            return digest(expected) == digest(value)
        pair = ValueTable(self._table.tolerance)
        is_equal = pair.equals(pair.add(Value.of(expected)), Value.of(value))
        return is_equal and expected.dtype == value.dtype

    def _first_unmatched(self, names: Sequence[str]) -> int | None:
        """Returns the earliest operator on which differing values depend through values that are not the baseline's.

        A number that Python reads has no tensor; it is followed if no tensor can be.
        """
        operators = self._candidate.operators
        origins = self._candidate.origins(names)
        if all(operators[position].is_matched for position in origins):
            reads = (operator.producers for operator in operators if operator.name == READ)
            origins = [position for positions in reads for position in positions if position is not None]
        excused = self._excused()

        def is_common(operator: Operator) -> bool:
            return operator.is_matched or id(operator) in excused

        positions = _uncommon(operators, origins, is_common)
        positions = positions or _uncommon(operators, origins, lambda operator: operator.is_matched)
        return min(positions, default=None)

    def _excused(self) -> set[int]:
        """Returns the operators whose values are not the baseline's, although something computed from them is.

        A change may concatenate tensors for one product, and use them again in the backward pass.
        """
        operators = self._candidate.operators
        excused = set()
        blamed = set()
        for operator in operators:
            producers = (operators[position] for position in operator.producers if position is not None)
            unmatched = {id(producer) for producer in producers if not producer.is_matched}
            if operator.is_matched and operator.reads_content:
                excused |= unmatched
            elif not operator.is_matched and not operator.is_view and len(unmatched) == 1:
                # Nothing else explains this value; a sum of reversed rows excuses nothing.
                blamed |= unmatched
        return excused - blamed

    def _first_without_effect(self) -> int | None:
        """Returns the earliest operator with another value although what it changes is overwritten later.

        Clipping hides a factor of all gradients.
        """
        excused = self._excused()
        for position, operator in enumerate(self._candidate.operators):
            if not operator.is_matched and id(operator) not in excused:
                return position
        return None

    def _is_rarer(self, name: str) -> bool:
        """Returns whether the candidate calls an operator less often than the baseline."""
        counts = [
            sum(operator.name == name for operator in recording.operators)
            for recording in (self._candidate, self._reference)
        ]
        return counts[0] < counts[1]

    def _first_missing(self, names: Sequence[str]) -> int | None:
        """Returns the earliest operator of the baseline whose values the candidate needs and never computes."""
        operators = self._reference.operators
        return min(_uncommon(operators, self._reference.origins(names), self._is_claimed), default=None)

    def _is_claimed(self, operator: Operator) -> bool:
        numbers = [number for match in operator.outputs if match is not None for number in _numbers(match)]
        return all(number in self._claimed or number == TRUSTED.number for number in numbers)

    def _describe(self, operator: Operator, position: int) -> DivergingOperator:
        operators = self._candidate.operators
        if operator.changed_input is not None:
            producer = operators[operator.changed_input]
            remark = "whose output is changed afterwards by no operator of torch"
            return _named(producer, operator.changed_input, len(operators), remark)
        count = len(operators)
        counterpart = self._counterpart(operator, has_name=True)
        if counterpart is not None and operator.foreign_shape is not None:
            shape = f"an input of shape {operator.foreign_shape}"
            remark = f"with {shape} that existed before the update and is not the baseline's"
            return self._with_values(_named(operator, position, count, remark), operator, counterpart)
        if counterpart is not None and not self._has_other_input(operator, counterpart):
            return self._with_values(_named(operator, position, count, ""), operator, counterpart)
        if self._is_additional(operator, position):
            extra = _named(operator, position, count, "which the baseline does not have")
            return self._with_values(extra, operator, self._like_an_input(operator))
        left_out = self._left_out(operator)
        if left_out is not None and not self._is_rarer(self._reference.operators[left_out].name):
            left_out = None
        replaced = self._counterpart(operator, has_name=False)
        if replaced is not None and left_out is None:
            name = self._reference.operators[replaced].name
            described = _named(operator, position, count, f"where the baseline has {name}")
            return self._with_values(described, operator, replaced)
        if left_out is not None:
            return self._describe_missing(left_out)
        if counterpart is None:
            return _named(operator, position, count, "which the baseline does not have")
        return self._with_values(_named(operator, position, count, "with another input"), operator, counterpart)

    def _describe_missing(self, position: int) -> DivergingOperator:
        operators = self._reference.operators
        return _named(operators[position], position, len(operators), "which the baseline has, is left out")

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
            is_likely = reference.shapes == operator.shapes and not self._is_claimed(reference)
            if not is_likely or (reference.name == operator.name) != has_name:
                continue
            others = _inputs(reference)
            if inputs and not inputs & others if has_name else not inputs or inputs != others:
                continue
            common = len(inputs & others) + 0.5 * (reference.place == operator.place)
            if best is None or common > most:
                most = common
                best = position
        return best

    def _has_other_input(self, operator: Operator, counterpart: int) -> bool:
        """Returns whether an input is another value than that of the baseline's operator."""
        expected = self._reference.operators[counterpart].inputs
        pairs = zip(operator.inputs, expected, strict=False)
        return any(match is not None and other is not None and match.number != other.number for match, other in pairs)

    def _is_additional(self, operator: Operator, position: int) -> bool:
        """Returns whether the baseline gives an input of an operator directly to the next one."""
        followers = {other.name for other in self._candidate.operators if position in other.producers}
        inputs = _inputs(operator)
        return any(
            reference.name in followers and inputs & _inputs(reference) and not self._is_claimed(reference)
            for reference in self._reference.operators
        )

    def _left_out(self, operator: Operator) -> int | None:
        """Returns the baseline's operator between an input of this one and the same operator of the baseline."""
        inputs = _inputs(operator)
        for reference in self._reference.operators:
            is_same = (reference.name, reference.place) == (operator.name, operator.place)
            if not is_same or self._is_claimed(reference):
                continue
            producers = [position for position in reference.producers if position is not None]
            between = _uncommon(self._reference.operators, producers, self._is_claimed)
            # A constant of an operator that is left out is missing, too.
            position = min((at for at in between if _inputs(self._reference.operators[at]) & inputs), default=None)
            if position is not None:
                return position
        return None

    def _like_an_input(self, operator: Operator) -> int | None:
        """Returns the position at which the baseline has the input that an additional operator replaces."""
        numbers = {match.number for match in operator.inputs if match is not None and match != TRUSTED}
        for position, reference in enumerate(self._reference.operators):
            match = reference.outputs[0] if reference.outputs else None
            if match is not None and match.number in numbers and reference.shapes[:1] == operator.shapes[:1]:
                return position
        return None

    def _with_values(
        self, described: DivergingOperator, operator: Operator, counterpart: int | None
    ) -> DivergingOperator:
        """Returns the description with the element of both values that differs most."""
        output = next((number for number, match in enumerate(operator.outputs) if match is None), None)
        if output is None or counterpart is None:
            return described
        value = operator.unmatched[output]
        reference = self._reference.operators[counterpart]
        match = reference.outputs[output] if output < len(reference.outputs) else None
        if match is None or match == TRUSTED:
            return described
        expected = self._table.values[match.number].numbers
        if expected.shape != value.numbers.shape or not expected.numel():
            return described
        is_same = (value.numbers == expected) | (value.numbers.isnan() & expected.isnan())
        distance = (value.numbers - expected).abs().nan_to_num(nan=math.inf).masked_fill(is_same, 0.0)
        furthest = int(distance.argmax())
        self.compared = Compared(counterpart, output, furthest)
        return replace(described, baseline=float(expected[furthest]), candidate=float(value.numbers[furthest]))

    @property
    def _last_common(self) -> str:
        operators = self._candidate.operators
        matched = [operator for operator in operators if operator.is_matched and operator.name != READ]
        return f"; the last common operator is {matched[-1].name} in the {matched[-1].place}" if matched else ""


def _inputs(operator: Operator) -> set[int]:
    """Returns the numbers of the values that an operator reads."""
    return {match.number for match in operator.inputs if match is not None and match != TRUSTED}


def _numbers(match: Match) -> Iterator[int]:
    yield match.number
    yield from match.pieces


def _uncommon(operators: Sequence[Operator], origins: Sequence[int], is_common: Callable[[Operator], bool]) -> set[int]:
    """Follows operators backward as far as they are not common, and returns the positions of these."""
    pending = [position for position in origins if not is_common(operators[position])]
    visited = set(pending)
    while pending:
        producers = operators[pending.pop()].producers
        for position in producers:
            if position is None or position in visited or is_common(operators[position]):
                continue
            visited.add(position)
            pending.append(position)
    return visited


def _named(operator: Operator, position: int, count: int, remark: str) -> DivergingOperator:
    place = operator.place
    return DivergingOperator(operator.name, place.module, place.phase, position + 1, count, remark)
