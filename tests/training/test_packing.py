"""Kinds of values that a checkpoint brings back as they were, and those that it refuses by name."""

import enum
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from runner.system.errors import RunnerError
from runner.training import checkpoint
from runner.training.checkpoint import Writer, kept
from runner.training.packing import module_versions
from runner.training.state_difference import differences
from runner.training.unpacking import unpack

EYE = torch.eye(4)
TENSORS = {
    "sparse COO": EYE.to_sparse(),
    "uncoalesced": torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True),
    "an empty sparse tensor": torch.zeros(3, 5).to_sparse(),
    "hybrid": torch.rand(3, 4).to_sparse(1),
    "complex128": EYE.cdouble() * 1j,
    "complex64": torch.rand(3, 2).cfloat(),
    "a conjugate view": (EYE.cfloat() * 1j).conj(),
    "a negative view": (EYE.cfloat() * 1j).conj().imag,
    "float8": EYE.to(torch.float8_e5m2),
    "uint16": torch.arange(5).to(torch.uint16),
    "uint64": torch.full((), 2**63, dtype=torch.uint64),
    "a scalar of bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
    "a transposed complex matrix": torch.rand(2, 3).cdouble().T,
    "NaN with a payload": torch.tensor([0x7FC00001, 0x7F800000], dtype=torch.int32).view(torch.float32),
    "minus zero": torch.tensor([-0.0, 0.0]),
    "nothing": torch.zeros(0, 3, dtype=torch.complex128),
}
SCALARS = {
    "a numpy scalar": np.float64(0.1),
    "a half": np.float16(0.1),
    "a numpy bool": np.True_,
    "an array": np.arange(6, dtype=">i4").reshape(2, 3).T,
    "words": np.array(["a", "bc"]),
    "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "bytes": b"\x00\xff",
    "a bytearray": bytearray(b"ab"),
    "a path": Path("a/b"),
    "a set": {1, "a", (2, 3)},
    "a frozen set": frozenset({1.5}),
    "a large integer": -(10**5000),
    "NaN": math.nan,
    "infinity": -math.inf,
    "a complex number": 1 - 2j,
    "half of a surrogate pair": "\ud800",
    "a range": range(1, 9, 2),
    "a shape": torch.Size([2, 3]),
    "a type": torch.bfloat16,
    "a device": torch.device("cuda:1"),
    "a queue": deque([1, 2], maxlen=3),
    "an ordered dictionary": OrderedDict(b=1, a=2),
    "a counter": Counter("abb"),
    "a dictionary with a default": defaultdict(list, {"a": [1]}),
}
KEYS = [("a", 1), 3, -1, True, None, 2.5, math.inf, b"x", frozenset({1}), 10**40, "3", np.int64(7), Path("x")]


def written_and_read(folder, state):
    writer = Writer(folder)
    writer.save(1, state)
    writer.wait()
    assert writer.failure is None
    return checkpoint.load(writer.newest())


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    state = {"tensors": TENSORS, "scalars": SCALARS, "keys": {key: number for number, key in enumerate(KEYS)}}
    return written_and_read(tmp_path_factory.mktemp("packed"), state)


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_any_kind_comes_back_to_the_bit(name, read):
    before, after = TENSORS[name], read["tensors"][name]
    assert (before.dtype, before.layout, before.shape) == (after.dtype, after.layout, after.shape)
    assert not list(differences(before, after))
    if before.layout is torch.strided and before.dtype.itemsize > 1 and before.dtype != torch.uint16:
        assert torch.equal(before.resolve_conj().nan_to_num(), after.nan_to_num())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc"])
def test_a_compressed_sparse_tensor_comes_back(layout, tmp_path):
    blocks = [(2, 2)] if layout[-3] == "b" else []
    matrix = getattr(torch.arange(16.0).view(4, 4), layout)(*blocks)
    after = written_and_read(tmp_path, {"matrix": matrix})["matrix"]
    assert after.layout == matrix.layout
    assert torch.equal(after.to_dense(), matrix.to_dense())


@pytest.mark.parametrize("name", SCALARS)
def test_a_value_of_any_kind_comes_back_as_the_same_kind(name, read):
    before, after = SCALARS[name], read["scalars"][name]
    assert type(before) is type(after)
    assert np.all(before == after) or repr(before) == repr(after)  # NaN is not equal to itself
    assert getattr(before, "dtype", None) == getattr(after, "dtype", None)


def test_the_default_of_a_dictionary_comes_back(read):
    assert read["scalars"]["a dictionary with a default"]["new"] == []


def test_keys_of_any_kind_come_back(read):
    assert read["keys"] == {key: number for number, key in enumerate(KEYS)}
    assert [type(key) for key in read["keys"]] == [type(key) for key in dict.fromkeys(KEYS)]


def test_what_shares_memory_is_one_tensor_again():
    tensor = torch.zeros(3)
    read = kept({"one": tensor, "two": tensor.detach(), "three": tensor.clone()})
    read["one"].add_(1)
    assert [read[name].tolist() for name in ("one", "two", "three")] == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


Point = namedtuple("Point", "x")
LOOP: list = []
LOOP.append(LOOP)
REFUSED = {
    "an IntEnum": (Colour.RED, r"a Colour; keep its \.value"),
    "a kind of text": (Text("a"), "a Text"),
    "a named tuple": (Point(1), r"a Point; keep tuple\(\.\.\.\) of it"),
    "a generator": (torch.Generator(), r"a Generator; keep what its get_state\(\) returns"),
    "a module": (torch.nn.Linear(1, 1), r"a Linear; keep its state_dict\(\)"),
    "a function": (math.sin, "a builtin_function_or_method"),
    "a default that is a function": (defaultdict(lambda: 1), r"a defaultdict of <lambda>; it can of int, float"),
    "a list in itself": (LOOP, "a list that contains itself"),
    "objects": (np.array([object()]), "an array of type object"),
    "records": (np.zeros(1, "i4,f4"), "an array of type "),
    "a meta tensor": (torch.zeros(1, device="meta"), "a tensor on the meta device, which has no values"),
    "a lazy parameter": (torch.nn.UninitializedParameter(), "an? UninitializedParameter; call the lazy module once"),
    "a nested tensor": (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "keep the plain tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_checkpoint_cannot_hold_is_refused_by_its_entry(name):
    value, message = REFUSED[name]
    with pytest.raises(RunnerError, match=rf"^/learner/seen/0(/0)?: a checkpoint cannot hold .*{message}"):
        kept({"learner": {"seen": [value]}})


def test_a_very_deep_state_is_refused():
    state: list = []
    for _ in range(100_000):
        state = [state]
    with pytest.raises(RunnerError, match="nested deeper than 100 levels"):
        kept({"deep": state})


DIFFERENT = {
    "a type": (1, 1.0, "/x: int has become float"),
    "a value": (1.0, 2.0, "/x: 1.0 has become 2.0"),
    "a shape": (torch.ones(2), torch.ones(3), r"/x: its shape \[2\] has become \[3\]"),
    "a bit": (torch.tensor(0.0), torch.tensor(-0.0), "/x: its values have changed"),
    "a layout": (EYE, EYE.to_sparse(), "/x: its layout strided has become sparse_coo"),
    "a lost key": ({"a": 1}, {}, "/x/a: is lost"),
    "another key": ({}, {"a": 1}, "/x/a: was not there before"),
    "a length": ([1], [1, 2], "/x: 1 items have become 2"),
    "a class": ({}, OrderedDict(), "/x: dict has become OrderedDict"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_names_its_entry(name):
    before, after, message = DIFFERENT[name]
    (line,) = differences({"x": before}, {"x": after})
    assert re.search(message, line)


@pytest.mark.parametrize(
    "module", [torch.nn.BatchNorm1d(2), torch.nn.Sequential(torch.nn.BatchNorm1d(2)), torch.nn.Linear(1, 1)]
)
def test_the_versions_of_modules_come_back(module, tmp_path):
    state = module.state_dict()
    after = written_and_read(tmp_path, {"module": state})["module"]
    assert module_versions(after) == module_versions(state)
    assert bool(module_versions(after)) is any(layer._version == 2 for layer in module.modules())


@pytest.mark.parametrize("versions", [[1], {"a": -1}, {"a": 1.5}, {"a": None}, {"a": "2"}])
def test_versions_of_another_form_are_refused(versions):
    node = {"items": [], "class": "OrderedDict", "versions": versions}
    with pytest.raises(ValueError, match="versions of modules should be integers by name"):
        unpack(node, {}, None)
