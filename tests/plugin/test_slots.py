import pytest
import torch

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


@pytest.mark.parametrize(("size", "is_kept"), [(4, True), (2**16, False)])
@pytest.mark.parametrize("is_traced", [False, True])
def test_the_last_output_is_recorded_and_a_large_one_is_never_in_memory_twice(size, is_kept, is_traced):
    outputs, before = {}, []

    def step(value):
        before.append("step" in outputs)
        return torch.full((size,), value)

    slots = Slots()
    slots.define(step=step)
    slots.record("step", outputs, is_traced=is_traced)
    for value in (1.0, 2.0, 3.0):
        assert slots.step(value) is outputs["step"]
    assert outputs["step"][0] == 3.0
    assert before == [False, is_kept, is_kept]
