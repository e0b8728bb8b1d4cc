"""Memory of an update, predicted from every recipe that ships, without its data."""

import pytest
import torch
from running import tiny

from runner.memory.kinds import Kind, by_kind, by_module
from runner.plugin.registry import Registry
from runner.plugins.stages.gradient_accumulation import GradientAccumulationConfig
from runner.recipe.loader import load, shipped
from runner.system.errors import UsageError
from runner.system.tensor_trees import leaves
from runner.training import planning
from runner.training.planning import outline_of, plan_memory

QUICK = {"mamba2": ["data.context=32"], "marl_p": ["data.followers=1"], "marl_b": ["data.followers=1"]}
"""Settings without which a plan takes seconds, by the beginning of a recipe's name."""


@pytest.fixture
def no_data(tmp_path, monkeypatch):
    """A machine without a single file of data."""
    for name in ("RUNNER_DATA", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))


def planned(name, *sets):
    quick = next((settings for beginning, settings in QUICK.items() if name.startswith(beginning)), [])
    return plan_memory(load(name, ["device=cpu", *quick, *sets], Registry()))


def has_state(optimizer_settings):
    """Whether such an optimizer keeps tensors between updates."""
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    optimizer = optimizer_settings.optimizer()([parameter], **optimizer_settings.settings)
    optimizer.step()
    return any(isinstance(value, torch.Tensor) for value in optimizer.state[parameter].values())


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("name", shipped())
def test_every_recipe_is_planned_without_data(name):
    plan = planned(name)
    sizes = by_kind(plan.usage)
    assert not plan.is_real
    assert sum(sizes.values()) == plan.peak == plan.data()["peak_bytes"]
    assert sum(sum(kinds.values()) for kinds in by_module(plan.usage).values()) == plan.peak
    assert min(sizes.values()) >= 0
    assert sizes[Kind.parameters] > 0
    assert sizes[Kind.batch] > 0
    optimizers = load(name, [], Registry()).optimizer.values()
    assert (sizes[Kind.optimizer] > 0) == any(map(has_state, optimizers))
    assert plan.peak > sizes[Kind.parameters] + sizes[Kind.optimizer] + sizes[Kind.batch]


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("gps_esol", "the 64 largest molecules of esol.csv, padded to 56 atoms"),
        ("graphgpt_esol", "the 32 longest walks of esol.csv, padded to 240 tokens"),
    ],
)
def test_ragged_data_are_planned_for_the_largest_batch(name, largest):
    plan = planned(name)
    assert plan.largest == largest
    assert plan.largest in "\n".join(plan.lines())


@pytest.mark.parametrize("name", ["digits_classifier", "marl_phase2", "graf", "gcn_cora", "shakespeare_gpt"])
def test_tensors_without_numbers_need_what_real_ones_need(name, monkeypatch):
    recipe = tiny(name)
    outline = outline_of(recipe)
    fake = plan_memory(recipe, outline=outline)
    usage, _ = planning._update(recipe, (), torch.device("cpu"), outline, is_fake=False)
    real = sum(usage.values())
    assert fake.peak == pytest.approx(real, rel=0.05)
    assert by_kind(fake.usage)[Kind.parameters] == by_kind(usage)[Kind.parameters]


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("shakespeare_gpt", ("model.layers=4", "optimization.activation_checkpointing={segments: 2}")),
        ("gps_esol", ("model.layers=4", "optimization.activation_checkpointing={segments: 2}")),
        ("gps_esol", ("optimization.gradient_accumulation={divisors: [{epoch: 0, divisor: 4}]}",)),
        ("digits_classifier", ("optimization.gradient_accumulation={divisors: [{epoch: 0, divisor: 3}]}",)),
    ],
)
def test_plans_of_segments_and_divisors_need_what_real_tensors_need(name, sets):
    recipe = tiny(name, *sets)
    outline = outline_of(recipe)
    predicted = plan_memory(recipe, outline=outline).peak
    usage, _ = planning._update(recipe, (), torch.device("cpu"), outline, is_fake=False)
    assert predicted == pytest.approx(sum(usage.values()), rel=0.05)


@pytest.mark.parametrize("name", ["digits_classifier", "marl_baseline", "graf"])
def test_a_plan_leaves_the_generators_as_they_were(name):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    plan_memory(tiny(name))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["digits_classifier", "shakespeare_gpt", "graf"])
def test_parameters_are_counted_exactly_and_activations_grow_with_the_batch(name):
    small, large = (plan_memory(tiny(name, f"train.batch_size={size}")) for size in (4, 8))
    for kind in (Kind.parameters, Kind.optimizer):
        assert by_kind(small.usage)[kind] == by_kind(large.usage)[kind]
    assert by_kind(large.usage)[Kind.batch] == pytest.approx(2 * by_kind(small.usage)[Kind.batch], rel=0.01)
    assert large.peak > small.peak


def test_a_file_that_is_nobodys_but_the_users_has_to_be_there(tmp_path):
    recipe = load("shakespeare_gpt", [f"data.file={tmp_path / 'mine.txt'}", "device=cpu"], Registry())
    with pytest.raises(UsageError, match=r"mine\.txt"):
        plan_memory(recipe)


@pytest.mark.parametrize("name", shipped())
def test_outlines_say_what_sources_produce(name):
    """The tiny recipes read small files, or data that are made up."""
    recipe = tiny(name)
    outline = recipe.data.outline(recipe.train.batch_size)
    if outline is None:
        return
    from runner.training.pipeline import assemble
    from runner.training.step import Step

    pipeline = assemble(recipe)
    drawn = Step(pipeline).next()
    names = {path for path, _ in leaves(outline.batch)}
    assert names == {path for path, _ in leaves(drawn.batch)}
    described = dict(leaves(outline.batch))
    for path, tensor in leaves(drawn.batch):
        assert described[path].dtype == str(tensor.dtype).removeprefix("torch."), path
        assert len(described[path].shape) == tensor.dim(), path
        if not (recipe.data.shapes_vary or recipe.data.kind in PUBLISHED_SHAPES):
            assert described[path].shape == tuple(tensor.shape), path


PUBLISHED_SHAPES = {"citation_graph", "node_contexts"}
"""Sources that are planned with the published file, and replace it by something else where it is missing."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    ("name", "device"),
    [("marl_phase3", "cuda"), ("shakespeare_gpt", "cuda:1"), ("gcn_cora", "cuda"), ("conv_classifier", "cuda:1")],
)
def test_a_plan_for_a_gpu_that_is_not_here_is_an_estimate(name, device):
    plan = planned(name, f"device={device}")
    assert (plan.device, plan.kernels, plan.tolerance) == ("cuda", "cpu", None)
    assert plan.peak == pytest.approx(planned(name).peak, rel=0.05)
    assert "an estimate with the operators of a cpu, because no GPU is here" in plan.lines()[0]


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("name", ["digits_classifier", "shakespeare_gpt", "grasp_diffusion", "graf"])
def test_later_parts_of_a_batch_need_no_more_memory(name, monkeypatch):
    # A first part, one after it, and the last one.
    sets = ("train.batch_size=12", "optimization.gradient_accumulation={micro_batch: 4}")
    planned_here = planned(name, *sets)
    complete = staticmethod(lambda setting, batch_size: batch_size)
    monkeypatch.setattr(GradientAccumulationConfig, "planned_batch_size", complete)
    expected = planned(name, *sets)
    assert planned_here.batch_size == expected.batch_size == 12
    assert planned_here.peak == pytest.approx(expected.peak, rel=0.01)
    assert by_kind(planned_here.usage)[Kind.batch] == pytest.approx(by_kind(expected.usage)[Kind.batch], rel=0.02)


LENGTHS = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from runner.api import DatasetConfig, DatasetSource, GradientLearner, GradientLearnerConfig, Loss


class RecurrentConfig(GradientLearnerConfig):
    '''Reads the lengths of sequences.'''

    kind, learns_from, implementation = "recurrent", "sequences", "Recurrent"


class Recurrent(GradientLearner):
    def build(self, config, shapes, context):
        return nn.GRU(4, 8, batch_first=True)

    def inputs(self, batch):
        return pack_padded_sequence(batch["x"], batch["length"].cpu(), batch_first=True, enforce_sorted=False)

    def loss(self, batch, noise, progress):
        output, _ = self.slots.forward(self.inputs(batch))
        output, _ = pad_packed_sequence(output, batch_first=True)
        return Loss(output.square().sum(), len(output))


class SequencesConfig(DatasetConfig):
    '''Sequences of one to six numbers.'''

    kind, provides, in_memory, implementation = "sequences", "sequences", True, "Sequences"


class Sequences(DatasetSource):
    def datasets(self, config):
        data = {"x": torch.ones(60, 6, 4), "length": torch.arange(60) % 6 + 1}
        return data, {name: rows[:6] for name, rows in data.items()}
"""


def test_a_learner_that_reads_numbers_gets_those_of_a_batch(tmp_path):
    plugin = tmp_path / "lengths.py"
    plugin.write_text(LENGTHS)
    recipe = tmp_path / "lengths.yaml"
    recipe.write_text(
        "{name: lengths, model: {kind: recurrent}, data: {kind: sequences}, optimizer: {lr: 1e-3},"
        " train: {updates: 2, batch_size: 12}}"
    )
    plan = plan_memory(load(recipe, ["device=cpu"], Registry([plugin])), [plugin])
    assert plan.is_real
    assert by_kind(plan.usage)[Kind.batch] == 12 * (6 * 4 * 4 + 8)
