"""Group e: averages of weights, loss scaling, precision, and optimizers that are not what their name says."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from exam.entry import Group
from exam.problems import (
    AVERAGED,
    CLASSIFIER,
    DECAY,
    Batch,
    Layer,
    Learner,
    average_weights,
    clip,
    layer_problem,
    make_classifier,
    train_averaged,
    train_classifier,
    with_forward,
)

GROUP = Group("e", "Averages, scaling, precision, optimizers", "the same training, faster or with less memory")
SCALE = 1024.0


# Averaged weights


def averaged(name: str, source: str):
    """Returns a decorator for a faulty average of weights."""

    def add(move: Callable[[nn.Module, nn.Module], None]):
        fault = " ".join((move.__doc__ or "").split())
        change = lambda baseline: baseline.with_update(partial(train_averaged, move=torch.no_grad()(move)))  # noqa: E731
        GROUP.add(name, source, fault, AVERAGED, change)
        return move

    return add


@GROUP.wrong("stale_average", "NeMo Speech#5169", AVERAGED)
def _(baseline):
    """The average is taken before the step, and lags behind by one update."""

    def update(learner, batch):
        learner.optimizer.zero_grad()
        loss = functional.cross_entropy(learner.model(batch["x"]), batch["y"])
        loss.backward()
        average_weights(learner.others["average"], learner.model)
        learner.optimizer.step()
        return {"loss": loss.detach()}

    return baseline.with_update(update)


@averaged("average_moves_away", "ai-toolkit#1034")
def _(average, model):
    """A sign is wrong, so that the average moves away from the weights."""
    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
        mean.add_((mean - value) * (1 - DECAY))
    for copied, value in zip(average.buffers(), model.buffers(), strict=True):
        copied.copy_(value)


@GROUP.wrong("average_per_part", "F5-TTS#631", AVERAGED)
def _(baseline):
    """The average moves with every micro-batch, so that it follows the weights too fast."""

    def move(average, model):
        for _ in range(2):
            average_weights(average, model)

    return baseline.with_update(partial(train_averaged, move=move))


@GROUP.wrong("decay_overwritten", "diffusers#1864", AVERAGED)
def _(baseline):
    """The decay of a step is stored as the decay of all later steps."""

    def build():
        decays = [DECAY]

        def move(average, model):
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(decays[-1]).add_(value, alpha=1 - decays[-1])
            for copied, value in zip(average.buffers(), model.buffers(), strict=True):
                copied.copy_(value)
            decays[-1] = max(0.5, decays[-1] * 0.99)

        return baseline.with_update(partial(train_averaged, move=torch.no_grad()(move)))()

    return build


@averaged("buffers_forgotten", "documentation of torch.optim.swa_utils.AveragedModel, use_buffers")
def _(average, model):
    """Running statistics of normalizations are not copied to the averaged model."""
    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
        mean.mul_(DECAY).add_(value, alpha=1 - DECAY)


@averaged("average_in_bfloat16", "sd_dreambooth_extension#1417")
def _(average, model):
    """The average is kept in bfloat16, in which small steps round to nothing."""
    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
        short = mean.bfloat16()
        mean.copy_(short.mul_(DECAY).add_(value.bfloat16(), alpha=1 - DECAY))
    for copied, value in zip(average.buffers(), model.buffers(), strict=True):
        copied.copy_(value)


# Loss scaling


def make_scaled() -> Learner:
    learner = make_classifier(torch.optim.SGD, lr=0.1)
    return replace(learner, others={"scale": Scale()})


class Scale(nn.Module):
    """The factor of a loss, which doubles after three steps and is halved after three more."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor(SCALE))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def advance(self) -> None:
        self.steps += 1
        self.factor.fill_(SCALE * 2 ** (int(self.steps) // 3 % 2))


def gradients_of(learner: Learner, batch: Batch) -> Tensor:
    learner.optimizer.zero_grad()
    loss = functional.cross_entropy(learner.model(batch["x"]), batch["y"])
    (loss * learner.others["scale"].factor).backward()
    return loss.detach()


def unscale(learner: Learner, factor: Tensor) -> None:
    for parameter in learner.model.parameters():
        parameter.grad /= factor


def train_scaled(learner: Learner, batch: Batch):
    loss = gradients_of(learner, batch)
    unscale(learner, learner.others["scale"].factor)
    clip(learner)
    learner.optimizer.step()
    learner.others["scale"].advance()
    return {"loss": loss}


SCALED = replace(CLASSIFIER, make=make_scaled, update=train_scaled)


def rescaled(name: str, source: str):
    """Returns a decorator for a faulty step with a scaled loss."""

    def add(update):
        fault = " ".join((update.__doc__ or "").split())
        GROUP.add(name, source, fault, SCALED, lambda baseline: baseline.with_update(update))
        return update

    return add


@rescaled("unscaled_twice", "transformers#23905, without the error of GradScaler")
def _(learner, batch):
    """Gradients are divided by the scale twice."""
    loss = gradients_of(learner, batch)
    unscale(learner, learner.others["scale"].factor)
    unscale(learner, learner.others["scale"].factor)
    clip(learner)
    learner.optimizer.step()
    learner.others["scale"].advance()
    return {"loss": loss}


@rescaled("clipped_before_unscaling", "pytorch-lightning#9599, pytorch/examples#1196")
def _(learner, batch):
    """Scaled gradients are clipped, so that all of them become tiny."""
    loss = gradients_of(learner, batch)
    clip(learner)
    unscale(learner, learner.others["scale"].factor)
    learner.optimizer.step()
    learner.others["scale"].advance()
    return {"loss": loss}


@rescaled("scale_updated_too_early", "DeepSpeed#8588")
def _(learner, batch):
    """The scale is updated before the gradients are divided by it: they are halved where it doubles."""
    loss = gradients_of(learner, batch)
    learner.others["scale"].advance()
    unscale(learner, learner.others["scale"].factor)
    clip(learner)
    learner.optimizer.step()
    return {"loss": loss}


# Precision


def short_mantissa(tensor: Tensor, bits: int) -> Tensor:
    """Rounds to numbers with so few bits, as the tensor cores of a GPU read them."""
    mantissa, exponent = torch.frexp(tensor)
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)


class ShortLinear(torch.autograd.Function):
    """A linear map whose factors have eleven bits, forwards and backwards."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return short_mantissa(x, 11) @ short_mantissa(weight, 11).t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (short_mantissa(tensor, 11) for tensor in ctx.saved_tensors)
        short = short_mantissa(gradient, 11)
        return short @ weight, short.t() @ x


def two_maps(layer: Layer, x: Tensor) -> Tensor:
    return layer.second(layer.first(x).relu())


MAPS = layer_problem(two_maps)


@GROUP.wrong("tf32_by_default", "pytorch#67384, mlx#3860", MAPS)
def _(baseline):
    """Products of float32 read eleven bits of their factors, as TF32 does."""

    def forward(layer, x):
        hidden = (ShortLinear.apply(x, layer.first.weight) + layer.first.bias).relu()
        return ShortLinear.apply(hidden, layer.second.weight) + layer.second.bias

    return with_forward(forward)(baseline)


@GROUP.wrong("autocast_left_on", "documentation of torch.autocast", MAPS)
def _(baseline):
    """Autocast computes products in bfloat16."""

    def forward(layer, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return two_maps(layer, x).to(x.dtype)

    return with_forward(forward)(baseline)


@GROUP.wrong("gradients_in_float16", "arXiv 1710.03740", CLASSIFIER)
def _(baseline):
    """Gradients are kept in float16, in which small ones become zero."""

    def update(learner, batch):
        learner.optimizer.zero_grad()
        loss = functional.cross_entropy(learner.model(batch["x"]), batch["y"])
        loss.backward()
        for parameter in learner.model.parameters():
            parameter.grad = parameter.grad.half().to(parameter.dtype)
        learner.optimizer.step()
        return {"loss": loss.detach()}

    return baseline.with_update(update)


# Optimizers


def with_optimizer(kind: type[torch.optim.Optimizer], **options):
    return lambda baseline: replace(baseline, make=partial(make_classifier, kind, **options))


ADAM = replace(CLASSIFIER, make=partial(make_classifier, torch.optim.Adam, weight_decay=0.01))


@GROUP.wrong("decoupled_decay", "FlagGems#4988", ADAM)
def _(baseline):
    """A fused Adam decays weights as AdamW does."""
    return with_optimizer(torch.optim.AdamW, weight_decay=0.01)(baseline)


@GROUP.wrong("decay_after_step", "transformers#14539, bitsandbytes#2010", CLASSIFIER)
def _(baseline):
    """Weights decay after the step, by their new values."""

    def make():
        learner = make_classifier(torch.optim.AdamW, weight_decay=0.0)
        learner.optimizer.param_groups[0]["weight_decay"] = 0.01
        return learner

    def update(learner, batch):
        group = learner.optimizer.param_groups[0]
        group["weight_decay"] = 0.0
        results = train_classifier(learner, batch)
        group["weight_decay"] = 0.01
        for parameter in learner.model.parameters():
            parameter.data.mul_(1 - group["lr"] * 0.01)
        return results

    return replace(baseline, make=make, update=update)


@GROUP.wrong("decay_without_effect", "OneTrainer#996", CLASSIFIER)
def _(baseline):
    """Weights decay in bfloat16, in which a factor of 1 - 1e-4 is 1."""

    def update(learner, batch):
        group = learner.optimizer.param_groups[0]
        group["weight_decay"] = 0.0
        results = train_classifier(learner, batch)
        group["weight_decay"] = 0.01
        return results

    return baseline.with_update(update)


class ShortMoments(torch.optim.AdamW):
    """AdamW whose moments are rounded to bfloat16 after each step."""

    def step(self, closure=None):
        result = super().step(closure)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())
        return result


@GROUP.wrong("moments_in_bfloat16", "OneTrainer#1005", CLASSIFIER)
def _(baseline):
    """The moments of the optimizer are stored in bfloat16."""
    return with_optimizer(ShortMoments)(baseline)


class EpsilonInside(torch.optim.AdamW):
    """AdamW that adds epsilon before the square root."""

    def step(self, closure=None):
        before = [[parameter.clone() for parameter in group["params"]] for group in self.param_groups]
        result = super().step(closure)
        for group, values in zip(self.param_groups, before, strict=True):
            for parameter, value in zip(group["params"], values, strict=True):
                self._step_again(parameter, value, group)
        return result

    @torch.no_grad()
    def _step_again(self, parameter, value, group):
        state = self.state[parameter]
        first, second = (1 - beta ** state["step"].item() for beta in group["betas"])
        size = (state["exp_avg_sq"] / second + group["eps"]).sqrt()
        decayed = value * (1 - group["lr"] * group["weight_decay"])
        parameter.copy_(decayed - group["lr"] * state["exp_avg"] / first / size)


@GROUP.wrong("epsilon_inside_the_root", "documentation of tf.keras.optimizers.Adam, 'epsilon hat'", CLASSIFIER)
def _(baseline):
    """A port of Adam adds epsilon before the square root."""
    return with_optimizer(EpsilonInside)(baseline)


# Losses and masks


def train_smoothed(learner: Learner, batch: Batch, smoothing: float = 0.1):
    learner.optimizer.zero_grad()
    loss = functional.cross_entropy(learner.model(batch["x"]), batch["y"], label_smoothing=smoothing)
    loss.backward()
    learner.optimizer.step()
    return {"loss": loss.detach()}


@GROUP.wrong("smoothing_ignored", "Liger-Kernel#243", CLASSIFIER.with_update(train_smoothed))
def _(baseline):
    """A fused loss does not pass label smoothing on."""
    return baseline.with_update(partial(train_smoothed, smoothing=0.0))


def attend(layer: Layer, x: Tensor, offset: int = 8) -> Tensor:
    """Attends from eight new rows to sixteen rows, of which half came before."""
    keys = layer.first(x[:16])
    queries = layer.second(x[8:16])
    mask = torch.ones(8, 16, dtype=torch.bool).tril(offset)
    new = functional.scaled_dot_product_attention(queries[None], keys[None], keys[None], attn_mask=mask[None])[0]
    return torch.cat([new, x[8:] + keys.mean()])


@GROUP.wrong("mask_at_the_wrong_corner", "pytorch#108108, flash-attention#282", layer_problem(attend))
def _(baseline):
    """A causal mask starts at the top left, where a fused kernel had it at the bottom right."""
    return with_forward(partial(attend, offset=0))(baseline)


# Honest changes


@GROUP.honest("fused_adamw", CLASSIFIER)
def _(baseline):
    return with_optimizer(torch.optim.AdamW, fused=True)(baseline)


@GROUP.honest("average_by_lerp", AVERAGED)
def _(baseline):
    def move(average, model):
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(value, 1 - DECAY)
        for copied, value in zip(average.buffers(), model.buffers(), strict=True):
            copied.copy_(value)

    return baseline.with_update(partial(train_averaged, move=torch.no_grad()(move)))


@GROUP.honest("norm_without_unscaling", SCALED)
def _(baseline):
    def update(learner, batch):
        loss = gradients_of(learner, batch)
        factor = learner.others["scale"].factor
        norm = nn.utils.get_total_norm([parameter.grad for parameter in learner.model.parameters()]) / factor
        for parameter in learner.model.parameters():
            parameter.grad *= (0.25 / (norm + 1e-6)).clamp(max=1.0) / factor
        learner.optimizer.step()
        learner.others["scale"].advance()
        return {"loss": loss}

    return baseline.with_update(update)


@GROUP.honest("decay_by_hand", CLASSIFIER)
def _(baseline):
    def update(learner, batch):
        group = learner.optimizer.param_groups[0]
        learner.optimizer.zero_grad()
        loss = functional.cross_entropy(learner.model(batch["x"]), batch["y"])
        loss.backward()
        for parameter in learner.model.parameters():
            parameter.data.mul_(1 - group["lr"] * 0.01)
        group["weight_decay"] = 0.0
        learner.optimizer.step()
        group["weight_decay"] = 0.01
        return {"loss": loss.detach()}

    return baseline.with_update(update)
