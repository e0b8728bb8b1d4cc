import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.plugins.grasps.diffusion import alphas_cumprod, ddim, ddpm, straight, trailing

STEPS = 100


def network(x, step):
    """Some function of a sample and a step."""
    return torch.tanh(0.7 * x + step / STEPS)


@pytest.fixture(scope="module")
def diffusers():
    return pytest.importorskip("diffusers")


def betas(kept):
    return (1 - kept / torch.cat([kept.new_ones(1), kept[:-1]])).float().numpy()


@pytest.mark.parametrize("steps", [5, 10, 20, 25, 50, 100])
def test_ddim_is_that_of_diffusers(diffusers, steps):
    kept = alphas_cumprod("cosine", STEPS)
    theirs = diffusers.DDIMScheduler(
        STEPS, trained_betas=betas(kept), prediction_type="sample", clip_sample=False, timestep_spacing="trailing"
    )
    theirs.set_timesteps(steps)
    assert trailing(steps, STEPS) == theirs.timesteps.tolist()
    noise = torch.randn(3, 25, generator=torch.Generator().manual_seed(0))
    x = noise
    for step in theirs.timesteps.tolist():
        x = theirs.step(network(x, step), step, x).prev_sample
    ours = ddim(network, noise[None], kept.sqrt().float(), (1 - kept).sqrt().float(), steps)
    torch.testing.assert_close(ours, x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("eta", [0.3, 1.0])
@pytest.mark.parametrize("steps", [5, 20, 100])
def test_ddim_with_fresh_noise_is_that_of_diffusers(diffusers, steps, eta):
    kept = alphas_cumprod("cosine", STEPS)
    theirs = diffusers.DDIMScheduler(
        STEPS, trained_betas=betas(kept), prediction_type="sample", clip_sample=False, timestep_spacing="trailing"
    )
    theirs.set_timesteps(steps)
    noise = torch.randn(STEPS, 3, 25, generator=torch.Generator().manual_seed(0))
    x, places = noise[-1], trailing(steps, STEPS)
    for step, following in zip(places, [*places[1:], 0], strict=True):
        x = theirs.step(network(x, step), step, x, eta=eta, variance_noise=noise[following]).prev_sample
    ours = ddim(network, noise, kept.sqrt().float(), (1 - kept).sqrt().float(), steps, eta)
    torch.testing.assert_close(ours, x, rtol=0, atol=1e-4)


def test_with_all_steps_and_all_noise_fresh_ddim_is_ddpm():
    kept = alphas_cumprod("cosine", STEPS)
    noise = torch.randn(STEPS, 3, 25, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = ddim(network, noise, kept.sqrt(), (1 - kept).sqrt(), STEPS, eta=1.0)
    torch.testing.assert_close(ours, ddpm(network, noise, kept), rtol=0, atol=1e-9)


@pytest.mark.parametrize("schedule", ["cosine", "linear_seed"])
def test_ddpm_is_that_of_diffusers_with_the_same_noise(diffusers, monkeypatch, schedule):
    kept = alphas_cumprod(schedule, STEPS)
    theirs = diffusers.DDPMScheduler(STEPS, trained_betas=betas(kept), prediction_type="sample", clip_sample=False)
    noise = torch.randn(STEPS, 3, 25, generator=torch.Generator().manual_seed(0))
    left = iter(noise.flip(0)[1:])
    module = __import__("importlib").import_module(type(theirs).__module__)
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: next(left))
    x = noise[-1]
    for step in range(STEPS - 1, -1, -1):
        x = theirs.step(network(x, step), step, x).prev_sample
    torch.testing.assert_close(ddpm(network, noise, kept.float()), x, rtol=0, atol=1e-5)


def test_the_cosine_ends_in_noise_and_the_other_schedule_does_not():
    assert float(alphas_cumprod("cosine", STEPS)[-1].sqrt()) == pytest.approx(4.9e-4, rel=0.02)
    assert float(alphas_cumprod("linear_seed", STEPS)[-1].sqrt()) == pytest.approx(0.776, abs=1e-3)


def test_signal_and_noise_are_on_a_straight_line():
    signal, sigma = straight(4)
    assert signal.tolist() == [0.75, 0.5, 0.25, 0.0]
    torch.testing.assert_close(signal + sigma, torch.ones_like(signal))


@given(st.integers(1, 100), st.integers(0, 2**16))
def test_a_network_that_knows_the_answer_gets_it_in_any_number_of_steps(steps, seed):
    answer = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed))
    for signal, sigma in (straight(100), ((kept := alphas_cumprod("cosine", 100)).sqrt(), (1 - kept).sqrt())):
        noise = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed + 1))
        torch.testing.assert_close(ddim(lambda *_: answer, noise[None], signal.float(), sigma.float(), steps), answer)


def test_half_way_noise_is_the_share_that_it_should_be():
    """One step of two: what is left of the noise is what the schedule says, to the last digit."""
    signal, sigma = straight(4)
    asked = []
    ddim(lambda x, step: asked.append((step, x)) or torch.zeros_like(x), torch.ones(1, 1), signal, sigma, 2)
    assert [(step, float(x)) for step, x in asked] == [(3, 1.0), (1, 0.5)]
