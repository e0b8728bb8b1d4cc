import json
import math
import re
import signal
import statistics as reference

import pytest
import torch
from builders import build_masac, random_batch
from hypothesis import given
from hypothesis import strategies as st
from toy_runs import RECIPE, TOYS, Notes, trained, written

from runner.api import Progress
from runner.plugin.registry import Registry
from runner.plugins.marl.stages.merged_critic_loss import MergedCriticLossConfig
from runner.plugins.marl.stages.stacked_agents import StackedAgentsConfig
from runner.recipe.loader import load
from runner.system.errors import DivergedError, RunnerError
from runner.training.checkpoint import checkpoints
from runner.training.checkpoint import load as load_checkpoint
from runner.training.guards import FIRST_UPDATES, FiniteGuard, GradientGuard, named_tensors, statistics
from runner.training.loop import Loop
from runner.training.pipeline import assemble
from runner.training.signals import Stop
from runner.training.step import Step

POISONED = TOYS.with_name("poisoned.py")
PROGRESS = Progress("env_steps", 2000, env_steps=1234, updates=567)
SPECIAL = st.sampled_from([math.nan, math.inf, -math.inf])
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


def after(updates, length=100):
    """Progress after that many updates of a training whose data have no epochs."""
    return Progress("updates", length, updates=updates)


def check_often(guard, first, last, idle=()):
    for number in range(first, last):
        guard.check(after(number), idle)


def update(learner, batch):
    return learner.slots.update(batch, learner.noise(batch, torch.Generator().manual_seed(0)), PROGRESS)


def guarded_update(learner, guard, batch):
    output = update(learner, batch)
    losses = torch.stack([v for v in output.values() if v.dim() == 0])
    if not losses.isfinite().all():
        guard.check(PROGRESS, batch, output)


def diagnosed(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / "diagnosis.json").read_text(), parse_constant=refuse)


def test_a_nan_in_the_batch_is_named_and_counted(tmp_path):
    learner = build_masac()
    guard = FiniteGuard(learner.slots, learner, tmp_path / "run")
    batch = random_batch(0)
    guarded_update(learner, guard, batch)
    assert not (tmp_path / "run").exists()
    batch["reward"][3, 1] = float("nan")
    expected = r"env_steps 1234, update 567: tensor 'reward' of the batch is not finite; .* in .*run/diagnosis\.json$"
    with pytest.raises(DivergedError, match=expected):
        guarded_update(learner, guard, batch)
    found = diagnosed(tmp_path / "run")
    assert (found["step"], found["update"]) == (1234, 567)
    assert (found["found"]["kind"], found["found"]["tensor"], found["found"]["slot"]) == ("batch", "reward", None)
    assert {name: tensor["nan"] for name, tensor in found["batch"].items()} == dict.fromkeys(batch, 0) | {"reward": 1}
    assert (found["losses"]["critic_loss"], found["losses"]["actor_loss"]) == ("NaN", "NaN")
    assert 0.9 < found["losses"]["temperature"] < 1  # no reward reaches it


def test_the_diagnosis_holds_every_slot_and_parameter(tmp_path):
    learner = build_masac()
    guard = FiniteGuard(learner.slots, learner, tmp_path)
    loss = learner.slots.critic_loss
    learner.slots.replace("critic_loss", lambda *args: (loss(*args)[0] * float("inf"), loss(*args)[1]))
    with pytest.raises(DivergedError, match="slot 'critic_step'"):
        guarded_update(learner, guard, random_batch(0))
    found = diagnosed(tmp_path)
    assert tuple(found["slots"]) == learner.story
    assert found["slots"]["target_step"] == {}  # it returns nothing
    assert found["slots"]["targets"]["output"]["shape"] == [3, 32]
    assert found["slots"]["critic_step"]["loss"] | {"inf": 3, "min": None} == found["slots"]["critic_step"]["loss"]
    assert found["losses"]["critic_loss"] == "Infinity"
    assert found["parameters"].keys() == dict(learner.named_parameters()).keys()
    for name, parameter in learner.named_parameters():
        described = found["parameters"][name]
        assert described["parameter_not_finite"] == int((~parameter.isfinite()).sum())
        if described["parameter_not_finite"] == 0:
            assert described["parameter_norm"] == pytest.approx(parameter.norm().item(), rel=1e-5)
        elif described["parameter_not_finite"] == parameter.numel():
            assert described["parameter_norm"] is None


def test_a_loss_of_an_earlier_update_is_enough(tmp_path):
    learner = build_masac()
    guard = FiniteGuard(learner.slots, learner, tmp_path)
    output = update(learner, random_batch(0))
    with pytest.raises(DivergedError, match=r"env_steps 1234, update 567: a loss was not finite in an earlier update"):
        guard.check(PROGRESS, random_batch(0), output)
    assert diagnosed(tmp_path)["found"]["tensor"] is None


def test_a_loss_that_comes_from_nowhere_is_named(tmp_path):
    learner = build_masac()
    learner.slots.wrap("update", lambda step: lambda *args: step(*args) | {"extra_loss": torch.tensor(float("nan"))})
    guard = FiniteGuard(learner.slots, learner, tmp_path)
    with pytest.raises(DivergedError, match="slot 'update' returned a tensor 'extra_loss' that is not finite"):
        guarded_update(learner, guard, random_batch(0))


@pytest.mark.parametrize("what", ["gradient", "parameter"])
def test_a_parameter_and_its_gradient_are_looked_at_last(tmp_path, what):
    learner = build_masac()
    guard = FiniteGuard(learner.slots, learner, tmp_path)
    output = update(learner, random_batch(0))
    name, parameter = next(iter(learner.named_parameters()))
    learner.gradients()
    with torch.no_grad():
        (parameter if what == "parameter" else parameter.grad).view(-1)[:2] = float("inf")
    with pytest.raises(DivergedError, match=rf"{what}.* '{name}' is not finite"):
        guard.check(PROGRESS, random_batch(0), output)
    assert diagnosed(tmp_path)["parameters"][name][f"{what}_not_finite"] == 2


def test_a_disk_that_is_full_does_not_hide_what_happened(tmp_path):
    learner = build_masac()
    (tmp_path / "run").write_text("a file where the folder should be")
    guard = FiniteGuard(learner.slots, learner, tmp_path / "run")
    batch = random_batch(0)
    batch["reward"][:] = float("nan")
    with pytest.raises(DivergedError, match=r"'reward' of the batch .* no diagnosis could be written \(.*exists"):
        guarded_update(learner, guard, batch)


@pytest.mark.parametrize("stages", [[], ["merged"], ["merged", "stacked"]])
@pytest.mark.parametrize(
    ("slot", "named"),
    [
        ("target", "slot 'targets'"),
        ("critic_loss", "slot 'critic_step' returned a tensor 'loss'"),
        ("actor_loss", "slot 'actor_step' returned a tensor 'loss'"),
    ],
)
def test_the_first_slot_with_a_nan_is_named(slot, named, stages, tmp_path):
    kinds = {"merged": MergedCriticLossConfig, "stacked": StackedAgentsConfig}
    learner = build_masac([kinds[name]() for name in stages])
    step = getattr(learner.slots, slot)

    def wrong(*args):
        output = step(*args)
        return output * float("inf") if slot == "target" else (output[0] * float("nan"), *output[1:])

    learner.slots.replace(slot, wrong)
    with pytest.raises(DivergedError, match=named):
        guarded_update(learner, FiniteGuard(learner.slots, learner, tmp_path), random_batch(0))


@pytest.mark.parametrize(
    ("slot", "named"), [("actor_forward", r"actors\.0\.head"), ("critic_forward", r"critics\.0\.q1")]
)
def test_a_detached_module_is_noticed(slot, named):
    learner = build_masac()
    forward = getattr(learner.slots, slot)
    learner.slots.replace(slot, lambda *args: forward(*args).detach())
    learner.slots.replace("backward", lambda loss: loss.backward() if loss.requires_grad else None)
    guard = GradientGuard(learner)
    for i in range(1, FIRST_UPDATES):
        update(learner, random_batch(i))
        guard.check(after(i))
    with pytest.raises(RunnerError, match=f"no gradient has reached {named}"):
        guard.check(after(FIRST_UPDATES))


def test_what_the_learner_calls_idle_may_wait():
    learner = build_masac()
    guard = GradientGuard(learner)
    names = [name for name, _ in learner.named_parameters()]
    check_often(guard, 1, 50, names)
    with pytest.raises(RunnerError, match=f"no gradient has reached {min(names)}"):
        check_often(guard, 50, 90, set(names) - {min(names)})  # which has turns of its own from here on
    assert guard.turns[min(names)] == FIRST_UPDATES


@pytest.mark.parametrize(
    ("kind", "until", "epoch", "stopped"),
    [
        ("none", 300, 400, None),  # a rare sample of the first epoch
        ("none", math.inf, 400, 400),  # every sample was seen
        ("none", math.inf, 5, FIRST_UPDATES),
        ("none", math.inf, 5000, 500),  # no epoch, but half of the training
        ("none", 90, None, None),
        ("none", math.inf, None, 100),  # a tenth of a training without epochs
        ("zero", 450, 5, None),  # an annealed loss
        ("zero", math.inf, 5, 500),
        ("zero", math.inf, None, 500),
        ("nan", 15, 5, None),
        ("idle", math.inf, 5, None),
    ],
)
def test_a_parameter_waits_for_its_first_gradient_as_long_as_it_may(kind, until, epoch, stopped, caplog):
    learner = build_masac()
    update(learner, random_batch(0))  # all have a gradient, and all roles a step
    guard = GradientGuard(learner)
    guard.unstepped.clear()
    (name, parameter), *_ = learner.named_parameters()
    gradient, size = parameter.grad, 8
    fills = {"none": None, "zero": torch.zeros_like(gradient), "nan": torch.full_like(gradient, torch.nan)}
    listed = rf"{re.escape(name)} \(1 parameters\)"
    said = rf"no gradient.* has reached {listed} in the first {stopped} updates: .*Masac\.idle"

    def train():
        for number in range(1, 1001):
            parameter.grad = gradient if number > until else fills.get(kind)
            samples = epoch and epoch * size
            progress = Progress("updates", 1000, epoch_samples=samples, updates=number, samples=size * number)
            if not guard.done:
                guard.check(progress, [name] if kind == "idle" else [])

    if stopped is None:
        train()
        assert guard.done is (kind != "idle")
    else:
        with pytest.raises(RunnerError, match=said) as error:
            train()
        assert ("other than zero" in str(error.value)) is (kind == "zero")
    warned = until > FIRST_UPDATES and kind != "idle" and stopped != FIRST_UPDATES
    assert len([record for record in caplog.records if "in the first 20 updates" in record.message]) == warned


@pytest.mark.parametrize("period", [1, 3])
def test_a_parameter_has_as_many_turns_as_others_however_rarely_it_is_stepped(period, monkeypatch):
    learner = build_masac()
    update(learner, random_batch(0))
    (name, parameter), *_ = learner.named_parameters()
    monkeypatch.setattr(learner, "periods", lambda: {name: period})
    guard = GradientGuard(learner)
    guard.unstepped.clear()
    parameter.grad = None
    last = FIRST_UPDATES * period
    check_often(guard, 1, last, [])
    with pytest.raises(RunnerError, match=rf"no gradient.* has reached {re.escape(name)} .* first {last} updates"):
        check_often(guard, last, last + 1, [])


def test_a_waiting_role_may_be_idle_and_has_turns_of_its_own():
    learner = build_masac()
    guard = GradientGuard(learner)
    names = [name for name, _ in learner.named_parameters()]
    check_often(guard, 1, 60, names)
    said = r"role 'actor' was not stepped in the first 79 .* or Masac\.idle\(progress\) name its parameters"
    for name in names:
        guard.missing.discard(name)
    with pytest.raises(RunnerError, match=said):
        check_often(guard, 60, 90)


@pytest.mark.parametrize("sets", [(), ("model.late=0.4",), ("train.ema=0.9", "optimizer.max_grad_norm=1.0")])
def test_a_rare_head_is_trained(sets, tmp_path, caplog):
    pipeline = mixture(tmp_path, "train.updates=300", *sets)
    trained(tmp_path, pipeline)
    assert "model.heads.3.weight" in caplog.text  # reported after 20 updates, and trained later
    assert pipeline.progress.updates == 300


def test_a_head_that_is_never_chosen_stops_the_training(tmp_path):
    said = r"has reached model\.heads\.4\.bias, model\.heads\.4\.weight \(2 parameters\) in the first 150"
    pipeline = mixture(tmp_path, "train.updates=300", "model.unused=true")
    with pytest.raises(RunnerError, match=said):
        trained(tmp_path, pipeline)
    resumed = GradientGuard(pipeline.learner)  # half of its turns before, half afterwards
    guard = GradientGuard(pipeline.learner)
    guard.turns.update(dict.fromkeys(guard.missing, 12))
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert resumed.turns == guard.turns


def mixture(folder, *sets):
    """The learner with a head for one sentence in 48, which learns from one sentence at a time."""
    plugins = [TOYS, TOYS.with_name("annealing.py")]
    (folder / "toy.yaml").write_text(RECIPE.replace("kind: toy}", "kind: toy_mixture}"))
    recipe = load(folder / "toy.yaml", ["seed=8", "train.batch_size=1", "data.rows=960", *sets], Registry(plugins))
    return assemble(recipe, plugins)


def test_a_healthy_model_is_done_with_at_once():
    learner = build_masac()
    guard = GradientGuard(learner)
    update(learner, random_batch(0))
    guard.check(after(1))
    assert guard.done


def test_a_resumed_run_does_not_judge_a_trained_parameter_anew():
    learner = build_masac()
    guard = GradientGuard(learner)
    update(learner, random_batch(0))
    guard.check(after(1))
    resumed = GradientGuard(build_masac())
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    resumed.check(after(500))  # before any gradient


def test_a_resumed_run_does_not_forget_an_untrained_module():
    learner = build_masac()
    forward = learner.slots.actor_forward
    learner.slots.replace("actor_forward", lambda *args: forward(*args).detach())
    learner.slots.replace("backward", lambda loss: loss.backward() if loss.requires_grad else None)
    guard = GradientGuard(learner)
    update(learner, random_batch(0))
    guard.check(after(1))
    resumed = GradientGuard(learner)
    resumed.load_state_dict(guard.state_dict())
    assert not resumed.done
    assert resumed.missing == guard.missing
    for name, parameter in learner.named_parameters():
        if name not in guard.missing:
            parameter.grad = torch.zeros_like(parameter)  # by chance, and no reason to complain
    with pytest.raises(RunnerError, match=rf"no gradient has reached actors.*\({len(guard.missing)} parameters\)"):
        check_often(resumed, 2, 90)
    assert resumed.turns[min(resumed.missing)] == FIRST_UPDATES


@given(st.lists(NUMBERS | SPECIAL, max_size=30))
def test_statistics_are_those_of_the_finite_numbers(numbers):
    found = statistics(torch.tensor(numbers, dtype=torch.float32))
    finite = [number for number in numbers if math.isfinite(number)]
    assert found["shape"] == [len(numbers)]
    assert found["dtype"] == "float32"
    assert found["nan"] == sum(math.isnan(number) for number in numbers)
    assert found["nan"] + found["inf"] + len(finite) == len(numbers)
    if finite:
        assert (found["min"], found["max"]) == (min(finite), max(finite))
        scale = max(map(abs, finite))
        assert found["mean"] == pytest.approx(reference.fmean(finite), abs=1e-12 * scale)
        assert found["std"] == pytest.approx(reference.pstdev(finite), rel=1e-6, abs=1e-12 * scale)
    else:
        assert [found[name] for name in ("min", "max", "mean", "std")] == [None] * 4
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.complex64]
)
def test_every_type_of_number_is_described(dtype):
    found = statistics(torch.tensor([[1, 0], [1, 1]]).to(dtype))
    assert found["dtype"] == str(dtype).removeprefix("torch.")
    assert (found["shape"], found["min"], found["max"], found["nan"]) == ([2, 2], 0, 1, 0)


def test_what_overflows_is_still_json():
    found = statistics(torch.tensor([1e308, 1e308, -1e308], dtype=torch.float64))
    assert (found["max"], found["inf"]) == (1e308, 0)
    assert found["std"] in ("Infinity", "NaN")
    json.dumps(found, allow_nan=False)


def test_a_tensor_that_learns_is_described_and_left_alone():
    tensor = torch.tensor([3.0, -4.0], requires_grad=True)
    assert statistics(tensor)["mean"] == -0.5
    assert tensor.requires_grad
    assert tensor.grad_fn is None


def test_tensors_are_named_by_field_position_or_key():
    tensor = torch.zeros(2)
    step = torch.return_types.max((tensor, tensor))
    assert [name for name, _ in named_tensors(tensor)] == ["output"]
    assert [name for name, _ in named_tensors((tensor, 3, tensor))] == ["output 0", "output 2"]
    assert [name for name, _ in named_tensors({"a": tensor, "b": None})] == ["a"]
    assert [name for name, _ in named_tensors(step)] == ["output 0", "output 1"]
    assert named_tensors(None) == []


def poisoned(folder, what, *sets):
    written(folder)
    sets = ("model.kind=poisoned", f"model.what={what}", "model.bad=[2]", "train.updates=12", *sets)
    recipe = load(
        folder / "toy.yaml", ["train.log_every=4", "train.checkpoint_every=2", *sets], Registry([TOYS, POISONED])
    )
    return assemble(recipe, [TOYS, POISONED])


@pytest.mark.parametrize(
    "sets", [(), ("optimization.gradient_accumulation.micro_batch=3",), ("train.on_nonfinite=skip",)]
)
@pytest.mark.parametrize("what", ["nan", "inf"])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_metric_without_a_value_does_not_stop_a_training(what, sets, on_host, tmp_path):
    pipeline = poisoned(tmp_path, what, *sets)
    notes = Notes()
    loop = Loop(pipeline, tmp_path / "run", notes, notes, Stop())
    loop.means.on_host = on_host
    loop.run()
    values = [value for _, value in notes.points["train/rare"]]
    assert [repr(value) for value in values] == [what, "1.0", "1.0"]
    assert all(math.isfinite(value) for _, value in notes.points["train/loss"])
    if loop.skipped is not None:
        assert loop.skipped.count == 0


def test_a_resumed_training_has_the_metric_without_a_value(tmp_path):
    pipeline = poisoned(tmp_path, "nan")
    stop = Stop()

    def interrupting(step):
        def interrupted(*arguments):
            # After the update whose metric has no value, and before its report.
            if pipeline.progress.updates == 2:
                stop.received = signal.SIGTERM
            return step(*arguments)

        return interrupted

    pipeline.slots.wrap("update", interrupting)
    notes = Notes()
    Loop(pipeline, tmp_path / "run", notes, notes, stop).run()
    resumed = Loop(poisoned(tmp_path, "nan"), tmp_path / "run", notes, notes, Stop())
    resumed.load_state_dict(load_checkpoint(checkpoints(tmp_path / "run" / "checkpoints")[-1]))
    assert resumed.progress.updates == 3
    resumed.run()
    assert [repr(value) for _, value in notes.points["train/rare"]] == ["nan", "1.0", "1.0"]


def test_the_origin_is_never_a_metric(tmp_path):
    pipeline = poisoned(tmp_path, "nan")
    learner = pipeline.learner
    guard = FiniteGuard(pipeline.slots, learner, tmp_path / "run")
    step = Step(pipeline)
    for _ in range(3):
        output = step()
    learner.module[3].bias.data[0] = math.nan
    with pytest.raises(DivergedError, match=r"parameter 'model\.3\.bias' is not finite"):
        guard.check(PROGRESS, {}, output)
    assert diagnosed(tmp_path / "run")["losses"]["rare"] == "NaN"
