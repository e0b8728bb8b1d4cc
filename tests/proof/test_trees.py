"""Trees of batches and states: their leaves, copies, and copies with other numbers."""

import copy
import random
import threading
import warnings
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.api import Ring
from runner.proof.trees import clones, leaves, named_tensors, put, scaled, to_float64, with_first_row

NUMBERS = st.integers(-9, 9) | st.floats(allow_nan=False) | st.booleans() | st.none() | st.text(max_size=3)
TENSORS = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.cfloat]).map(
    lambda dtype: torch.ones(2, 3).to(dtype)
)
NESTED = st.recursive(
    NUMBERS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner)
    ),
    max_leaves=8,
)


class Pair(NamedTuple):
    loss: torch.Tensor
    error: float


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor | None = None


def shape(value):
    """The same nested value with types for tensors."""
    if isinstance(value, dict):
        return {key: shape(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(shape(child) for child in value)
    return ("tensor", value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


@given(NESTED)
def test_copies_are_equal_and_share_nothing(value):
    copied = clones(value)
    assert shape(copied) == shape(value)
    for (path, mine), (other, theirs) in zip(leaves(value), leaves(copied), strict=True):
        assert path == other
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs)
            assert mine.data_ptr() != theirs.data_ptr()


@given(NESTED)
def test_only_floating_point_and_complex_tensors_are_doubled(value):
    for (_, mine), (_, theirs) in zip(leaves(value), leaves(to_float64(value)), strict=True):
        if isinstance(mine, torch.Tensor):
            doubled = torch.complex128 if mine.is_complex() else torch.float64
            assert theirs.dtype == (doubled if mine.is_complex() or mine.is_floating_point() else mine.dtype)
            assert torch.equal(mine.to(torch.complex128), theirs.to(torch.complex128))
        else:
            assert mine == theirs


def test_containers_stay_what_they_are():
    x = torch.ones(2, requires_grad=True)
    batch = UserDict(a=x, b=OrderedDict(c=(x, [x])), d=Pair(x, 0.5))
    copied = clones(batch)
    assert isinstance(copied, UserDict)
    assert isinstance(copied["b"], OrderedDict)
    assert isinstance(copied["d"], Pair)
    assert copied["d"].loss.requires_grad
    assert copied["d"].loss is not x
    assert batch["a"] is x


def test_leaves_have_dotted_names():
    ring = Ring(4, 6, lambda first, last: torch.arange(first, last))
    value = {
        "pair": Pair(torch.zeros(1), 0.5),
        "output": Output(torch.zeros(2)),
        "list": [1, {"x": "text"}],
        "array": np.ones(3),
        "kind": torch.float16,
        "strange": object(),
        "ring": ring,
        "empty": {},
    }
    found = dict(leaves(value))
    assert list(found) == [
        "pair.loss", "pair.error", "output.loss", "output.logits", "list.0", "list.1.x", "array", "kind", "strange",
        "ring.written", "ring.rows",
    ]  # fmt: skip
    assert found["array"].tolist() == [1, 1, 1]
    assert found["kind"] == "torch.float16"
    assert found["strange"] == "object"
    assert found["ring.rows"].tolist() == [2, 3, 4, 5]


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    words: list[str] = field(default_factory=list)


class Counting:
    """An object of a user, with attributes alone."""

    def __init__(self, count: int, memory: torch.Tensor):
        self.count = count
        self.memory = memory


def circle():
    first = Counting(1, torch.ones(2))
    first.itself = [first]
    return first


def quantised(number: float) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.full((2,), number), 0.1, 0, torch.qint8)


OBJECTS = {
    "deque": lambda number: deque([torch.full((2,), float(number))], 3),
    "set": lambda number: {"b", f"a{number}"},
    "attributes": lambda number: Counting(number, torch.ones(2)),
    "memory": lambda number: Counting(1, torch.full((2,), float(number))),
    "counter": lambda number: Counter({"a": number}),
    "fraction": lambda number: Fraction(number, 7),
    "random numbers": random.Random,
    "random numbers of numpy": np.random.default_rng,
    "random numbers of torch": lambda number: torch.Generator().manual_seed(number),
    "dataclass": lambda number: Frozen(torch.full((2,), float(number))),
    "array": lambda number: np.full(3, number, dtype=np.float32),
    "array of another byte order": lambda number: np.full(3, number, dtype=">i4"),
    "array of texts": lambda number: np.array(["a", f"b{number}"]),
    "array of dates": lambda number: np.array([number, 4], dtype="datetime64[D]"),
    "array of objects": lambda number: np.array([number, None], dtype=object),
    "text of numpy": lambda number: np.array([f"b{number}"])[0],
    "quantised": lambda number: quantised(float(number)),
    "float8": lambda number: torch.full((2,), float(number)).to(torch.float8_e4m3fn),
    "longdouble": lambda number: np.full(2, number, dtype=np.longdouble),
}


def contents(value):
    return [(name, listed(leaf) if isinstance(leaf, torch.Tensor) else leaf) for name, leaf in leaves(value)]


def listed(tensor):
    """Numbers of 8 bits have no ``tolist``, and a quantised tensor shows its scale."""
    return (tensor.dequantize() if tensor.is_quantized else tensor.float()).tolist()


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_are_compared_by_their_contents(kind):
    assert contents({"it": OBJECTS[kind](3)}) == contents({"it": OBJECTS[kind](3)})
    assert contents({"it": OBJECTS[kind](3)}) != contents({"it": OBJECTS[kind](4)})


@pytest.mark.parametrize("kind", OBJECTS)
def test_conversions_leave_objects_as_they_are(kind):
    value = {"it": OBJECTS[kind](3)}
    expected = contents(value)
    for converted in (clones(value), to_float64(value), scaled(1.0, value)):
        assert contents(converted) == expected
        assert type(converted["it"]) is type(value["it"])
    assert contents(value) == expected


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("deque", lambda value: value.append(torch.zeros(2))),
        ("deque", lambda value: value[0].zero_()),
        ("set", lambda value: value.add("c")),
        ("attributes", lambda value: setattr(value, "count", 9)),
        ("memory", lambda value: value.memory.zero_()),
        ("random numbers", lambda value: value.random()),
        ("random numbers of numpy", lambda value: value.random()),
        ("dataclass", lambda value: value.x.zero_()),
        ("array", lambda value: value.fill(0)),
        ("array of texts", lambda value: value.fill("c")),
    ],
)
def test_a_copy_does_not_change_with_its_original(kind, change):
    value = {"it": OBJECTS[kind](3)}
    copied = clones(value)
    change(value["it"])
    assert contents(copied) == contents({"it": OBJECTS[kind](3)})
    assert contents(value) != contents(copied)


def test_a_queue_keeps_its_length_and_its_order():
    queue = deque([torch.tensor(1.0), torch.tensor(2.0)], maxlen=2)
    doubled = scaled(2, queue)
    assert doubled.maxlen == 2
    assert [float(item) for item in doubled] == [2, 4]


def test_objects_that_refer_to_each_other_end():
    names = [name for name, _ in leaves(circle())]
    assert names[:3] == ["type", "count", "memory"]
    assert len(names) < 50


@pytest.mark.parametrize("value", [threading.Lock(), lambda: 0, object(), len, Counting, copy])
def test_what_has_no_contents_has_a_name(value):
    [(_, name), *_] = leaves({"it": value})
    assert isinstance(name, str)
    assert [*leaves(clones(value))] == [*leaves(value)]


def test_named_tensors_have_the_names_of_leaves():
    tree = {"a": torch.ones(2), "b": [np.ones(3), "text"], "c": Frozen(torch.zeros(1)), "d": deque([torch.ones(1)])}
    names = [name for name, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
    assert [*named_tensors(tree)] == names == ["a", "b.0", "c.x", "d.0"]


@pytest.mark.parametrize("name", ["a", "b.0", "c.x", "d.0"])
def test_a_number_is_put_into_one_tensor_of_any_container(name):
    tree = {"a": torch.ones(2), "b": [np.ones(3)], "c": Frozen(torch.ones(1)), "d": deque([torch.ones(1)])}
    changed = named_tensors(with_first_row(tree, name, 5.0))
    assert [other for other, tensor in changed.items() if float(tensor[0]) == 5] == [name]
    assert all(bool((tensor == 1).all()) for tensor in named_tensors(tree).values())


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("make", [torch.full, np.full])
def test_a_batch_is_put_into_the_objects_of_another_one(make, in_memory):
    def batch(number):
        return {"a": make((2,), number), "b": Frozen(make((2,), number), ["x"]), "c": deque([make((2,), number)])}

    target = batch(1.0)
    tensor, inner, queue = target["a"], target["b"], target["c"]
    written = put(batch(2.0), target, in_memory)
    assert written is target
    assert target["b"] is inner
    assert target["c"] is queue
    assert (target["a"] is tensor) is in_memory
    assert all(bool((value == 2).all()) for value in named_tensors(target).values())


def test_an_array_that_cannot_be_written_is_replaced():
    array = np.ones(2)
    array.flags.writeable = False
    target = {"a": array}
    put({"a": np.zeros(2)}, target)
    assert target["a"].tolist() == [0, 0]
    assert array.tolist() == [1, 1]


class Wrapping(MutableMapping):
    """A mapping whose shallow copy has the same items."""

    def __init__(self, items):
        self.items_inside = items

    def __getitem__(self, key):
        return self.items_inside[key]

    def __setitem__(self, key, value):
        self.items_inside[key] = value

    def __delitem__(self, key):
        del self.items_inside[key]

    def __iter__(self):
        return iter(self.items_inside)

    def __len__(self):
        return len(self.items_inside)


class Fixed(Mapping):
    """A mapping that cannot be changed, and takes its items by name."""

    def __init__(self, **items):
        self.inside = items

    __getitem__ = Wrapping.__getitem__
    __iter__ = Wrapping.__iter__
    __len__ = Wrapping.__len__

    @property
    def items_inside(self):
        return self.inside


@dataclass
class Answer(OrderedDict):
    """A dataclass and a mapping without the fields that are None, as answers of some models are."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        self.update({name: value for name, value in vars(self).items() if value is not None})


@dataclass
class Computed:
    x: torch.Tensor
    unset: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.extra = self.x * 2

    @cached_property
    def total(self):
        return self.x.sum()


MAPPINGS = {
    "wrapping": lambda x: Wrapping({"x": x}),
    "fixed": lambda x: Fixed(x=x),
    "proxy": lambda x: MappingProxyType({"x": x}),
    "ordered": lambda x: OrderedDict(x=x),
    "user": lambda x: UserDict(x=x),
    "answer": lambda x: Answer(logits=x),
}


@pytest.mark.parametrize("kind", MAPPINGS)
def test_a_copy_of_any_mapping_leaves_the_original_alone(kind):
    x = torch.ones(2)
    batch = MAPPINGS[kind](x)
    (name,) = batch
    wide = to_float64(batch)
    assert batch[name] is x
    assert [*wide] == [name]
    assert wide[name].dtype == torch.float64
    changed = with_first_row(batch, name, 5.0)
    assert changed[name].tolist() == [5, 1]
    assert x.tolist() == [1, 1]


def test_attributes_of_a_dataclass_are_copied_and_computed_values_are_not():
    batch = Computed(torch.ones(2))
    assert float(batch.total) == 2
    assert [name for name, _ in leaves(batch)] == ["x", "extra"]
    scaled_batch = scaled(3, batch)
    assert scaled_batch.extra.tolist() == [6, 6]
    assert float(scaled_batch.total) == 6
    assert (float(batch.total), batch.extra.tolist()) == (2, [2, 2])


def test_an_object_that_occurs_twice_is_compared_twice_and_copied_once():
    shared = Counting(1, torch.ones(2))
    tree = {"a": shared, "b": [shared]}
    assert [name for name, _ in leaves(tree)] == [
        "a.type",
        "a.count",
        "a.memory",
        "b.0.type",
        "b.0.count",
        "b.0.memory",
    ]
    copied = clones(tree)
    assert copied["a"] is copied["b"][0]
    assert copied["a"] is not shared


@pytest.mark.parametrize("dtype", [">i4", ">f4", "<f8"])
def test_an_array_keeps_its_byte_order(dtype):
    array = np.ones(3, dtype=dtype)
    assert clones({"a": array})["a"].dtype == array.dtype


def test_a_masked_array_keeps_its_mask():
    array = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    copied = clones({"a": array})["a"]
    assert copied.mask.tolist() == [True, False]
    copied[1] = 5
    assert array[1] == 2


@pytest.mark.parametrize("reduced", [(Counting,), 3, (Counting, ()), (Counting, (), None, 3)])
def test_an_object_that_pickles_in_a_wrong_way_is_its_name(reduced):
    class Odd:
        def __reduce_ex__(self, protocol):
            return reduced

    names = [leaf for _, leaf in leaves({"it": Odd()})]
    assert len(names) == 1


def test_sets_of_objects_do_not_depend_on_addresses():
    assert [*leaves({object() for _ in range(5)})] == [*leaves({object() for _ in range(5)})]
