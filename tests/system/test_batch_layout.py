"""Which entries of a batch have one row per sample, and batches that are cut by it."""

from collections import namedtuple

import pytest
import torch
from records import numbered, source_of

from runner.api import BatchLayout, Loss, RunnerError
from runner.plugin.learner import _divisor
from runner.plugins.stages.gradient_accumulation import _scale
from runner.system.tensor_trees import inferred_layout

Pair = namedtuple("Pair", "x y")
TABLE, MASK = torch.arange(8.0), torch.ones(8, 8).tril()


def made(count):
    """A batch whose tables are as long as eight samples."""
    return {
        "table": TABLE,
        "x": torch.arange(float(count))[:, None],
        "mask": MASK,
        "path": [f"{number}.png" for number in range(count)],
        "boxes": [torch.zeros(number, 4) for number in range(count)],
        "names": ["cockle", "whelk"],
        "pair": Pair(torch.arange(count), torch.tensor(0.5)),
        "caption": None,
    }


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_layout_is_inferred_from_batches_of_different_sizes(size):
    layout = inferred_layout(made(1), made)
    assert layout.shared == {"table", "mask", "names"}
    part = layout.take(made(8), slice(2, 2 + size))
    rows = range(2, min(8, 2 + size))
    assert part["x"][:, 0].tolist() == part["pair"].x.tolist() == [*rows]
    assert part["path"] == [f"{number}.png" for number in rows]
    assert [len(box) for box in part["boxes"]] == [*rows]
    assert part["table"] is TABLE
    assert part["mask"] is MASK
    assert part["names"] == ["cockle", "whelk"]
    picks = layout.take(made(8), torch.tensor([7, 0, 7]))
    assert (picks["path"], picks["x"][:, 0].tolist()) == (["7.png", "0.png", "7.png"], [7, 0, 7])


@pytest.mark.parametrize(
    ("repeat", "text"),
    [
        (lambda count: {"x": torch.zeros(count), "edges": torch.zeros(3 * count)}, "'edges' may not have one row"),
        (lambda count: {"x": torch.zeros(8, count)}, "'x' may not have one row per sample"),
    ],
)
def test_what_has_no_row_per_sample_is_not_cut(repeat, text):
    layout = inferred_layout(repeat(1), repeat)
    with pytest.raises(ValueError, match=text):
        layout.take(repeat(8), slice(0, 4))


@pytest.mark.parametrize("letters", [0, 1, 2])
def test_an_entry_without_elements_in_the_first_sample_is_not_shared(letters):
    """Targets of all samples, one after another, may be in front of or after the rows."""

    def repeat(count):
        targets = torch.ones(letters * count)
        return {"first": targets, "x": torch.zeros(count, 2), "last": targets}

    layout = inferred_layout(repeat(1), repeat)
    batch = {"first": torch.ones(14), "x": torch.zeros(8, 2), "last": torch.ones(14)}
    with pytest.raises(ValueError, match=r"'(first|last)' (may not have one row|has 14 rows)"):
        layout.take(batch, slice(0, 4), 8)


def test_an_entry_that_never_has_elements_is_in_each_part():
    def repeat(count):
        return {"empty": torch.zeros(0, 3), "x": torch.zeros(count, 2), "wide": torch.zeros(count, 0)}

    layout = inferred_layout(repeat(1), repeat)
    assert layout.size(repeat(8)) == 8
    part = layout.take(repeat(8), slice(0, 4))
    assert {name: tuple(entry.shape) for name, entry in part.items()} == {"empty": (0, 3), "x": (4, 2), "wide": (4, 0)}


def test_the_size_is_that_of_an_entry_with_one_row_per_sample():
    layout = BatchLayout(unknown={"targets"})
    assert layout.size({"targets": torch.zeros(14), "x": torch.zeros(8, 2)}) == 8


def test_an_entry_of_another_length_is_named_with_what_to_do():
    source = source_of(list(numbered(8)))
    with pytest.raises(RunnerError, match=r"'scale' has 9 rows in a batch of 8 samples; name .*Source\.layout = Batch"):
        list(source.split({"index": torch.zeros(8), "scale": torch.zeros(9)}, 4))


def test_a_declared_layout_decides():
    layout = BatchLayout(shared={"scale"})
    part = layout.take({"scale": TABLE, "x": torch.arange(8)}, slice(4, 6))
    assert (len(part["scale"]), part["x"].tolist()) == (8, [4, 5])


def test_samples_may_be_in_the_second_dimension():
    layout = BatchLayout(columns={"noise.next"})
    batch = {"noise": {"next": torch.arange(16).reshape(2, 8)}, "x": torch.arange(8)}
    part = layout.take(batch, slice(4, 6))
    assert part["noise"]["next"].tolist() == [[4, 5], [12, 13]]
    assert part["x"].tolist() == [4, 5]
    assert layout.take(batch, torch.tensor([7, 0]))["noise"]["next"].tolist() == [[7, 0], [15, 8]]
    assert layout.size(batch) == 8
    with pytest.raises(ValueError, match=r"'noise\.next' has 7 columns in a batch of 8 samples"):
        layout.take({"noise": {"next": torch.zeros(8, 7)}, "x": torch.zeros(8)}, slice(2), 8)


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_a_batch_in_which_nothing_counts_has_a_gradient_of_zero(count):
    weight = torch.ones(3, requires_grad=True)
    total = (weight * torch.zeros(3)).sum()
    (total / _divisor(Loss(total, count))).backward()
    assert weight.grad.eq(0).all()
    assert float(_scale(4, count)) in (1.0, 4.0)
    assert float(_divisor(Loss(torch.tensor(2.0), count))) == 0


@pytest.mark.parametrize("count", [5, 0.25, torch.tensor(5), torch.tensor(0.25)])
def test_other_counts_are_as_they_are(count):
    assert float(_divisor(Loss(torch.tensor(2.0), count))) == float(count)
    assert float(_scale(4, count)) == pytest.approx(4 / float(count))
