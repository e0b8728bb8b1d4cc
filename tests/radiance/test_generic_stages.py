"""Generic stages with a GAN of three networks: they keep their contract, or refuse with the reason."""

from dataclasses import replace

import pytest
import torch
from running import tiny, train_here

from runner.api import UsageError
from runner.plugin.optimizer import settings_of
from runner.plugin.registry import Registry
from runner.plugins.stages.activation_checkpointing import _checkpointed
from runner.proof.verdict import Outcome
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.verify.gate import Gate
from runner.verify.options import Options

REGISTRY = Registry()
ACCUMULATED = "optimization.gradient_accumulation.micro_batch="
CHECKPOINTED = "optimization.activation_checkpointing=on"


def gradients_after_an_update(*sets):
    """Returns the logged means and the gradients of all three networks."""
    torch.manual_seed(0)
    pipeline = assemble(tiny("graf", *sets))
    output = Step(pipeline)()
    gradients = pipeline.learner.gradients()
    logged = {name: float(mean.sum / mean.count) for name, mean in output.items()}
    return logged, gradients


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_each_network_accumulates_the_gradient_of_the_whole_batch(micro_batch):
    expected, whole = gradients_after_an_update()
    logged, accumulated = gradients_after_an_update(f"{ACCUMULATED}{micro_batch}")
    assert logged == pytest.approx(expected, rel=1e-4)
    assert {name.partition(".")[0] for name in whole} == {
        "discriminator", "generator", "super_resolution",
    }  # fmt: skip
    # Biases in front of an instance norm have no gradient but rounding errors.
    for network in ("discriminator", "generator", "super_resolution"):
        names = [name for name in whole if name.startswith(network)]
        scale = max(float(whole[name].abs().max()) for name in names)
        for name in names:
            torch.testing.assert_close(accumulated[name], whole[name], atol=1e-4 * scale, rtol=1e-3)


@pytest.mark.parametrize("chunk", [16, 64, 100, 4096])
@pytest.mark.parametrize("extra", [(), ("model.importance_samples=3",)])
def test_a_checkpointed_update_has_the_same_bits(chunk, extra):
    sets = (f"model.ray_chunk={chunk}", *extra)
    expected, plain = gradients_after_an_update(*sets)
    logged, checkpointed = gradients_after_an_update(*sets, CHECKPOINTED)
    assert logged == expected
    assert all(torch.equal(gradient, plain[name]) for name, gradient in checkpointed.items())


def test_a_checkpointed_discriminator_has_the_same_penalty_to_the_bit():
    results = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        learner = assemble(tiny("graf")).learner
        if is_checkpointed:
            learner.discriminator.module.forward = _checkpointed(learner.discriminator.module)
        planes = next(learner.discriminator.module.parameters()).shape[1] - 3
        real, condition = torch.randn(4, 3, 8, 8), torch.randn(4, planes, 8, 8)
        penalty = learner.gradient_penalty(real, condition)
        parameters = [*learner.discriminator.module.parameters()]
        slopes = torch.autograd.grad(penalty, parameters, allow_unused=True)
        results.append([penalty, *(slope for slope in slopes if slope is not None)])
    assert all(torch.equal(plain, again) for plain, again in zip(*results, strict=True))


def test_the_penalty_and_its_gradient_keep_float32_inside_of_autocast():
    learner = assemble(tiny("graf")).learner
    parameters = [*learner.discriminator.module.parameters()]

    def penalty_and_slopes(real, condition):
        penalty = learner.slots.gradient_penalty(real, condition)
        return [penalty, *torch.autograd.grad(penalty, parameters, allow_unused=True)]

    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        real = torch.randn(4, 3, 8, 8, generator=generator)
        condition = torch.randn(4, parameters[0].shape[1] - 3, 8, 8, generator=generator)
        expected = penalty_and_slopes(real, condition)
        with torch.autocast("cpu", torch.bfloat16):
            inside = penalty_and_slopes(real, condition)
        pairs = [pair for pair in zip(expected, inside, strict=True) if pair[0] is not None]
        assert len(pairs) > 3
        assert all(torch.equal(plain, automatic) for plain, automatic in pairs)


@pytest.mark.usefixtures("migrated_workspace")
def test_an_update_in_bfloat16_leaves_the_penalty_alone(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    expected, _ = gradients_after_an_update()
    logged, gradients = gradients_after_an_update("optimization.amp=on")
    assert logged["r1"] == expected["r1"]
    assert logged["d_loss"] != expected["d_loss"]
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())


def test_an_optimizer_without_a_fused_kernel_is_refused():
    recipe = tiny("graf", "optimization.fused_optimizer=on")
    optimizers = {**recipe.optimizer, "generator": settings_of("rmsprop")()}
    with pytest.raises(UsageError, match="fused_optimizer: RMSprop has no fused kernel"):
        assemble(replace(recipe, optimizer=optimizers))


@pytest.mark.usefixtures("migrated_workspace", "copied_children")
def test_the_batch_size_is_tuned_where_samples_count():
    length = "train={updates: null, samples: 32, log_every: 8, evaluate_every: 16}"
    result = train_here("graf", length, "train.checkpoint_every=16", "optimization.batch_autotune={largest: 8}")
    (report,) = (report for report in result.stages if report.kind == "batch_autotune")
    assert result.status == "FINISHED"
    assert report.active
    assert report.notes


def test_the_gate_passes_memory_stages():
    kinds = ("activation_checkpointing", "gradient_accumulation")
    settings = {"gradient_accumulation": "{micro_batch: 2}"}
    sets = [f"optimization.{kind}={settings.get(kind, 'on')}" for kind in kinds]
    options = Options(updates=2, budget=0.0, horizon=0, names_operators=False)
    verdict = Gate(tiny("graf", *sets), REGISTRY, options, lambda _: None)(kinds)
    assert verdict.outcome is Outcome.PASS, verdict.summary
