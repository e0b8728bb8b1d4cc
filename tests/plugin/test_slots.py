import pytest

from runner.plugin.context import Slots


def test_a_wrapper_goes_round_what_was_there():
    slots = Slots()
    slots.define(step=lambda x: x + 1)
    slots.wrap("step", lambda inner: lambda x: 10 * inner(x))
    assert slots.step(1) == 20


def test_a_wrapper_cannot_be_lost_by_replacing_what_it_wraps():
    slots = Slots()
    slots.define(step=lambda: 1)
    slots.replace("step", lambda: 2)
    assert slots.step() == 2
    slots.wrap("step", lambda inner: lambda: -inner())
    with pytest.raises(ValueError, match="'step' is wrapped already"):
        slots.replace("step", lambda: 3)


def test_a_slot_is_defined_once_and_an_unknown_one_lists_the_others():
    slots = Slots()
    slots.define(first=lambda: 1, second=lambda: 2)
    with pytest.raises(ValueError, match="'first' is defined twice"):
        slots.define(first=lambda: 3)
    with pytest.raises(AttributeError, match="no slot 'third'; the pipeline has: first, second"):
        slots.third()
    with pytest.raises(AttributeError, match="no slot 'third'"):
        slots.wrap("third", lambda inner: inner)
