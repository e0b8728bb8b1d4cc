"""A program answers as the network does, for batches and sequences of other sizes."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from learnt import attached, inputs, learnt, off
from running import RECIPES, tiny
from torch import nn

from runner.api import UsageError, nbytes
from runner.plugin.registry import Registry
from runner.plugins.inference import network, quantise
from runner.plugins.inference.export import ExportConfig
from runner.plugins.inference.network import ForwardCall
from runner.plugins.inference.program import Program, bytes_of, exported, of_onnx, of_torch, write_onnx
from runner.plugins.inference.quantise import QuantiseConfig
from runner.plugins.inference.size_conditions import SizeConditions
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.system.manifest import NAME
from runner.system.stored_json import sealed
from runner.training.inference_model import InferenceModel
from runner.training.pipeline import setting_of


@pytest.mark.parametrize("name", ["shakespeare_gpt", "grasp_cvae"])
def test_it_answers_as_the_network_does(name, tmp_path):
    pipeline = learnt(name, "model.layers=1")
    pipeline.folder = tmp_path
    asked = inputs(pipeline, 1, 3, 4)
    asked += [asked[1][:, :5]] if name == "shakespeare_gpt" else []
    expected = [pipeline.learner.predict(each) for each in asked]
    (stage,) = attached(pipeline, ExportConfig(format="torch"))
    pipeline.learner.module.forward = lambda *_: pytest.fail("the network itself was asked")
    assert [off(pipeline.learner.predict(each), before) for each, before in zip(asked, expected, strict=True)] == [
        pytest.approx(0, abs=1e-6)
    ] * len(asked)
    assert stage.closing_notes() == []
    assert list(tmp_path.iterdir()) == []
    assert stage.bytes == stage.program_bytes == nbytes(dict(pipeline.learner.module.state_dict()))
    assert f"the program has {stage.bytes:,} bytes" in pipeline.reports["export"].notes[0]


def test_the_program_stands_in_memory_beside_the_network():
    pipeline = learnt("digits_classifier")
    weights = nbytes(dict(pipeline.learner.module.state_dict()))
    (stage,) = attached(pipeline, ExportConfig())
    model = InferenceModel("it", pipeline)
    assert model.bytes == stage.bytes == stage.program_bytes
    assert model.bytes_in_memory == weights + stage.program_bytes


def test_an_onnx_file_answers_as_the_network_does_and_is_rounded_from(tmp_path, monkeypatch):
    """Convolutions, with ranges that batches show; what is sensitive stays; nothing is made twice."""
    pipeline = learnt("digits_classifier")
    pipeline.folder, asked = tmp_path, inputs(pipeline, 1, 3, 64)
    expected = [pipeline.learner.predict(each) for each in asked]
    (stage,) = attached(pipeline, ExportConfig())
    assert all(off(pipeline.learner.predict(each), before) < 1e-5 for each, before in zip(asked, expected, strict=True))
    assert stage.closing_notes() == []
    (path,) = tmp_path.glob("*.onnx")
    assert str(Path(__file__).parents[2]).encode() not in path.read_bytes()  # nobody's folders
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: pytest.fail("it was exported twice"))
    errors = []
    for _ in range(2):
        pipeline = learnt("digits_classifier")
        pipeline.folder = tmp_path
        attached(pipeline, QuantiseConfig())
        errors.append([off(pipeline.learner.predict(each), other) for each, other in zip(asked, expected, strict=True)])
        monkeypatch.setattr(quantise, "_round", lambda *_: pytest.fail("it was rounded twice"))
    assert errors[0] == errors[1]
    assert 0 < max(errors[0]) < 0.05
    weights = kinds(next(tmp_path.glob("quantise-*.onnx")))
    whole = {name for name, kind in weights.items() if kind == onnx.TensorProto.FLOAT and name.endswith("weight")}
    assert whole == {"stem.0.weight", "head.weight"}
    assert sum(kind == onnx.TensorProto.INT8 for kind in weights.values()) == 2 * len(pipeline.learner.blocks())


def kinds(path):
    """What the weights of an ONNX file are, by name."""
    return {each.name: each.data_type for each in onnx.load(path).graph.initializer if len(each.dims) > 1}


class Modulated(nn.Module):
    """Matrices of both sorts that an exporter makes: with a bias of its own, or an addition after the product."""

    def __init__(self):
        super().__init__()
        self.time, self.modulation, self.body = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, time):
        return self.body(x) + self.modulation(self.time(time).relu())[:, None]


@pytest.mark.parametrize("is_static", [False, True])
def test_matrices_are_rounded_but_what_is_kept(tmp_path, is_static):
    network, given = Modulated().eval(), (torch.randn(4, 3, 64), torch.randn(4, 8))
    asked = ForwardCall(given, network(*given).detach())
    write_onnx(exported(network, asked, "quantise"), tmp_path / "whole.onnx", "quantise")
    quantise._round(tmp_path / "whole.onnx", tmp_path / "rounded.onnx", ["time"], iter([asked]), is_static)
    weights = kinds(tmp_path / "rounded.onnx")
    assert sorted(weights.values()) == sorted([onnx.TensorProto.FLOAT, onnx.TensorProto.INT8, onnx.TensorProto.INT8])
    inputs = {node.op_type for node in onnx.load(tmp_path / "rounded.onnx").graph.node}
    assert ("DynamicQuantizeLinear" in inputs) != is_static
    assert ("QuantizeLinear" in inputs) == is_static
    (kept,) = (name for name, kind in weights.items() if kind == onnx.TensorProto.FLOAT)
    assert kept.removesuffix("_Transposed") == "time.weight"
    assert 0 < off(of_onnx(tmp_path / "rounded.onnx", asked).call(*given), asked.output) < 0.02
    with pytest.raises(UsageError, match="nothing is left"):
        quantise._round(tmp_path / "whole.onnx", tmp_path / "none.onnx", ["*"], iter([asked]), is_static)


def export(folder):
    """Exports a network into a folder; the program there answers as the network does."""
    pipeline = learnt("mlp")
    pipeline.folder = folder
    (images,) = inputs(pipeline, 3)
    before = pipeline.learner.predict(images)
    attached(pipeline, ExportConfig())
    assert off(pipeline.learner.predict(images), before) < 1e-5


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A folder with an exported network; nothing may change it."""
    folder = tmp_path_factory.mktemp("exports")
    export(folder)
    return folder


@pytest.mark.parametrize("damage", [None, "cut", "flipped", "not in the manifest", "no manifest"])
def test_what_was_exported_is_found_again_unless_it_is_damaged(damage, exports, tmp_path, monkeypatch, caplog):
    made, write = [], torch.onnx.export
    shutil.copytree(exports, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(torch.onnx, "export", lambda *given, **named: made.append(given) or write(*given, **named))
    (path,) = tmp_path.glob("*.onnx")
    content, manifest = path.read_bytes(), tmp_path / NAME
    if damage == "cut":
        path.write_bytes(content[:100])
    elif damage == "flipped":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif damage == "not in the manifest":
        manifest.write_text(sealed({"format": 1, "files": {}}))
    elif damage == "no manifest":
        manifest.unlink()
    export(tmp_path)
    assert len(made) == (damage is not None)
    assert len([*tmp_path.glob("*.onnx")]) == 1
    warnings = [record.getMessage() for record in caplog.records if "it is made again" in record.getMessage()]
    assert len(warnings) == (damage in ("cut", "flipped"))
    assert all(path.name in warning for warning in warnings)


def test_a_program_of_torch_is_written_where_the_recipe_says_without_a_sample_of_the_data(tmp_path):
    path = tmp_path / "net.pt2"
    attached(learnt("shakespeare_gpt", "model.layers=1"), ExportConfig(format="torch", path=str(path)))
    assert torch.export.load(path).example_inputs is None


def test_no_pt2_is_ever_read(tmp_path, monkeypatch):
    for name in ("torch.load", "torch.export.load", "pickle.load", "pickle.loads", "pickle.Unpickler"):
        monkeypatch.setattr(name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))
    for _ in range(2):
        pipeline = learnt("mlp")
        pipeline.folder = tmp_path
        for path in ("export-0123456789abcdef.pt2", f"export-{digest_of(pipeline)}.pt2"):
            (tmp_path / path).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
        attached(pipeline, ExportConfig(format="torch"))


def digest_of(pipeline):
    """The name that a file of an earlier version had."""
    learner = pipeline.learner
    return network.digest(learner.module, "torch", learner.config.model_dump())


def test_large_weights_lie_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("runner.plugins.inference.program.INLINE_BYTES", 0)
    network, given = nn.Linear(64, 64), (torch.randn(4, 64),)
    asked = ForwardCall(given, network(*given).detach())
    path = tmp_path / "large.onnx"
    write_onnx(exported(network, asked, "export"), path, "export")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["large.onnx", "large.onnx.data"]
    assert bytes_of(path) > 64 * 65 * 4 > path.stat().st_size
    assert off(of_onnx(path, asked).call(*given), asked.output) < 1e-5


class Counted(nn.Module):
    def forward(self, x):
        return x * len(x)


def test_a_size_that_became_a_number_is_part_of_the_form():
    given = (torch.ones(4, 2),)
    program = of_torch(exported(Counted(), ForwardCall(given, 4 * given[0]), "export"))
    assert program.fits(given)
    assert not program.fits((torch.ones(3, 2),))


def test_what_does_not_fit_is_asked_of_the_network_and_counted():
    module = nn.Identity().eval()
    program = Program(lambda *_: "program", [(torch.float32, (None, 2))], SizeConditions({frozenset(): ()}))
    forward = program.in_place_of(lambda: module)(lambda *_: "network")
    fitting = torch.zeros(3, 2)
    assert forward(fitting) == "program"
    others = [(torch.zeros(3, 1),), (fitting.double(),), (fitting[0],), (fitting, fitting), (None,)]
    assert [forward(*each) for each in others] == ["network"] * 5
    assert program.notes() == ["5 questions of another form, answered by the network itself"]
    module.train()
    assert forward(fitting) == "network"
    assert program.others == 5


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("inputs", [(torch.ones(2, 2),), ("text",)])
def test_what_cannot_be_traced_is_refused(inputs):
    with pytest.raises(UsageError, match=r"export: (torch.export cannot trace|every input of the network)"):
        exported(Branching(), ForwardCall(inputs, None), "export")


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    config = ExportConfig(format="torch", path=str(tmp_path / "no" / "net.pt2"))
    with pytest.raises(UsageError, match=r"path: .*No such file"):
        attached(learnt("shakespeare_gpt", "model.layers=1"), config)


@pytest.mark.parametrize(
    ("config", "changed", "said"),
    [
        (ExportConfig(path="net.pt2"), {}, "path: should end in .onnx"),
        (ExportConfig(), {"device": torch.device("cuda:0")}, "format: ONNX Runtime computes on a CPU"),
        (ExportConfig(), {"stages": {"compile": None}}, "switch compile off"),
    ],
)
def test_what_contradicts_is_refused(config, changed, said):
    setting = vars(setting_of(tiny("digits_classifier"), torch.device("cpu")))
    with pytest.raises(UsageError, match=said):
        config.inactive(SimpleNamespace(**setting | {"stages": {}} | changed))


def test_a_path_starts_at_the_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        f"extends: {RECIPES / 'digits_classifier.yaml'}\ninference: {{export: {{path: out/net.onnx}}}}\n"
    )
    assert load(tmp_path / "mine.yaml", [], Registry()).inference["export"].path == str(tmp_path / "out" / "net.onnx")


def test_a_learner_without_the_slot_is_refused_with_the_recipe():
    with pytest.raises(RecipeError, match="no slot 'forward'"):
        tiny("marl_baseline", "inference.export=on")


def measured_by_len(module):
    """A network whose forward turns the size of a batch into a number."""
    forward = module.forward
    module.forward = lambda image: forward(image).reshape(len(image), -1)
    return module


@pytest.mark.parametrize("config", [ExportConfig(), ExportConfig(format="torch"), QuantiseConfig()])
def test_a_program_for_one_size_of_batches_is_inactive(config):
    pipeline = learnt("mlp")
    measured_by_len(pipeline.learner.module)
    (images,) = inputs(pipeline, 3)
    expected = pipeline.learner.predict(images)
    pipeline.attach_to_learnt({config.kind: config})
    report = pipeline.reports[config.kind]
    assert not report.active
    assert "answers only batches of" in report.reason
    assert torch.equal(pipeline.learner.predict(images), expected)


def test_calls_are_counted_by_what_answered_them():
    pipeline = learnt("mlp")
    (stage,) = attached(pipeline, ExportConfig(format="torch"))
    (images,) = inputs(pipeline, 3)
    pipeline.learner.predict(images)
    with torch.no_grad():
        pipeline.learner.slots.forward(images[:0])
    assert (stage.program_calls, stage.network_calls) == (1, 1)
