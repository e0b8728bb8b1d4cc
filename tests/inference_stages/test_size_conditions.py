"""A program answers only for the sizes for which it computes what its network does."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from runner.plugins.inference.network import ForwardCall
from runner.plugins.inference.program import Program, exported, of_onnx, of_torch, write_onnx
from runner.plugins.inference.size_conditions import SizeConditions, compiled


class Short(nn.Module):
    def forward(self, x):
        return x * 0 if x.shape[1] > 5 else x


class Padded(nn.Module):
    """Odd lengths are padded, as in a U-Net."""

    def forward(self, x):
        x = functional.pad(x, (0, 1)) if x.shape[1] % 2 else x
        return x.unflatten(-1, (-1, 2)).mean(-1)


class Single(nn.Module):
    """A length of one is computed in another way, which an export assumes not to occur."""

    def forward(self, x):
        return x * 0 if x.shape[1] == 1 else x


class Area(nn.Module):
    def forward(self, x):
        return x if len(x.shape) * x.shape[0] * x.shape[1] < 50 else -x


class Small(nn.Module):
    """Its condition is met by all areas of two rows and more."""

    def forward(self, x):
        return -x if x.shape[0] * x.shape[1] < 4 else x


class Capped(nn.Module):
    def forward(self, x):
        return x.sum(1) if x.shape[1] > min(5, x.shape[0]) else x.sum(1) * 2


class Ratio(nn.Module):
    def forward(self, x):
        return x if x.shape[0] >= x.shape[1] / 2 else -x


class Checked(nn.Module):
    def forward(self, x):
        torch._check(x.shape[1] <= 9)
        return x


class Logarithm(nn.Module):
    """The condition on its sizes has a function that is not evaluated here."""

    def forward(self, x):
        return x if (x.shape[1] + 7) // 3 == round(x.shape[1] / 2 + 1) else -x


SHAPES = [(rows, columns) for rows in (1, 2, 3, 4, 9) for columns in (1, 2, 3, 5, 6, 7, 8, 11)][1:]


def programs(network, shape):
    example = ForwardCall((torch.randn(shape),), None)
    return exported(network.eval(), example, "export")


def right_shapes(network, program):
    """Shapes for which the program answers; each answer has to be the network's."""
    result = []
    for shape in SHAPES:
        x = torch.randn(shape)
        forward = program.in_place_of(lambda: network)(network)
        torch.testing.assert_close(forward(x), network(x))
        if program.fits((x,)):
            result.append(shape)
    return result


@pytest.mark.parametrize(
    ("network", "shape", "answered"),
    [
        (Short(), (4, 5), lambda rows, columns: columns <= 5),
        (Short(), (4, 6), lambda rows, columns: columns > 5),
        (Padded(), (4, 6), lambda rows, columns: columns % 2 == 0 and columns > 2),
        (Padded(), (4, 7), lambda rows, columns: columns % 2),
        (Single(), (4, 6), lambda rows, columns: columns > 1),
        (Area(), (4, 5), lambda rows, columns: 2 * rows * columns < 50),
        (Small(), (4, 6), lambda rows, columns: rows * columns >= 4),
        (Capped(), (4, 7), lambda rows, columns: columns > min(5, rows)),
        (Ratio(), (4, 6), lambda rows, columns: rows >= columns / 2 and (rows, columns) != (1, 2)),
    ],
)
def test_a_program_answers_where_it_is_right(network, shape, answered):
    program = of_torch(programs(network, shape))
    assert right_shapes(network, program) == [sizes for sizes in SHAPES if answered(*sizes)]


def test_conditions_are_kept_with_an_onnx_file(tmp_path):
    network = Padded()
    write_onnx(programs(network, (4, 6)), tmp_path / "padded.onnx", "export")
    x = torch.randn(4, 6)
    program = of_onnx(tmp_path / "padded.onnx", ForwardCall((x,), network(x)))
    assert right_shapes(network, program) == [(rows, columns) for rows, columns in SHAPES if columns in (6, 8)]


class Added(nn.Module):
    def forward(self, x, y):
        return x + y if x.shape[1] == y.shape[1] else x


def test_sizes_that_were_equal_have_to_be_equal():
    example = ForwardCall((torch.randn(4, 6), torch.randn(4, 6)), None)
    program = of_torch(exported(Added().eval(), example, "export"))
    assert program.fits((torch.ones(1, 3), torch.ones(1, 3)))
    assert not program.fits((torch.ones(2, 3), torch.ones(2, 1)))


def test_without_evaluable_conditions_only_the_sizes_of_the_example_fit():
    program = of_torch(programs(Logarithm(), (4, 6)))
    assert program.fits((torch.ones(4, 6),))
    assert not any(program.fits((torch.ones(shape),)) for shape in SHAPES if shape != (4, 6))


def test_what_the_network_checks_is_a_condition():
    program = of_torch(programs(Checked(), (4, 6)))
    assert program.fits((torch.ones(4, 9),))
    assert not program.fits((torch.ones(4, 11),))


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (1, 1)])
def test_sizes_that_were_not_compared_do_not_fit(shape):
    assert not of_torch(programs(Short(), (4, 5))).fits((torch.ones(shape),))


def test_a_program_that_raises_is_replaced_by_the_network_and_counted():
    def fail(x):
        raise RuntimeError("Reshape\nat node 3")

    program = Program(fail, [(torch.float32, (None,))], SizeConditions({frozenset(): ()}))
    forward = program.in_place_of(lambda: nn.Identity().eval())(lambda x: "network")
    assert [forward(torch.ones(2)), forward(torch.ones(3))] == ["network"] * 2
    (note,) = program.notes()
    assert note == "2 questions at which the program failed, answered by the network itself: Reshape"


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "size_0_0.__class__",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "9 ** 9 ** 9",
        "min.__self__",
        "torch.load('x')",
        "'a' * 9",
        "min(*size_0_0)",
        "min(1, key=size_0_0)",
        "size_0_0 <=",
    ],
)
def test_a_condition_from_a_file_executes_nothing(text):
    with pytest.raises(ValueError, match="no condition on sizes"):
        compiled(text)
    with pytest.raises(ValueError, match="no condition on sizes"):
        SizeConditions.from_json(json.dumps([[[], [text]]]))


def test_an_onnx_file_without_conditions_is_refused(tmp_path):
    import onnx

    network = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    path = tmp_path / "linear.onnx"
    write_onnx(exported(network, ForwardCall((x,), None), "export"), path, "export")
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, path)
    with pytest.raises(RuntimeError, match=r"linear\.onnx: it has no conditions"):
        of_onnx(path, ForwardCall((x,), network(x)))
