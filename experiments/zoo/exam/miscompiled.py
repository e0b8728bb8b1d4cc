"""Group a: miscompilations by torch.compile.

Every case has a correct function and, by hand, what the compiled one computes in versions of torch with the fault.
The exam uses torch.compile itself where the installed version still has the fault.
"""

# ruff: noqa: ARG004 (torch passes a context to both passes of a custom function)

from collections.abc import Callable
from functools import partial

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn import functional

from exam.entry import Group
from exam.problems import Forward, Layer, Problem, fit, layer_problem, with_forward

GROUP = Group("a", "Miscompilations by torch.compile", "compiled: the same algebra")


def compiled(backend: str, baseline: Problem) -> Problem:
    """Returns the problem with a compiled forward pass."""
    forward: Forward = baseline.update.keywords["forward"]
    return baseline.with_update(partial(fit, forward=torch.compile(forward, backend=backend)))


def case(name: str, issue: int, correct: Forward, backend: str = "aot_eager") -> Callable[[Forward], Forward]:
    """Returns a decorator for the faulty function; its docstring describes the fault."""

    def add(faulty: Forward) -> Forward:
        fault = " ".join((faulty.__doc__ or "").split())
        baseline = layer_problem(correct)
        change = partial(compiled, backend)
        GROUP.add(name, f"pytorch#{issue}", fault, baseline, change, emulation=with_forward(faulty))
        return faulty

    return add


# Mutations that are lost or happen in another order


def shift_by_running_mean(layer: Layer, x: Tensor) -> Tensor:
    hidden = layer.first(x)
    shadow = functional.dropout(layer.running, 0.5, training=False)
    shadow.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
    return hidden - layer.running


@case("mutation_through_dropout", 195422, shift_by_running_mean)
def _(layer, x):
    """A mutation through the identity that dropout returns in evaluation mode is dropped: a running mean stays 0."""
    return layer.first(x) - layer.running


Shift = Callable[[Tensor, Tensor], Tensor]


def shift_memory(memory: Tensor, tail: Tensor) -> Tensor:
    memory.add_(1.0)
    return tail[0]


def shift_other_view(memory: Tensor, tail: Tensor) -> Tensor:
    memory.add_(1.0)
    return memory[0] + 0 * tail[0]


def read_alias(layer: Layer, x: Tensor, shift: Shift = shift_memory) -> Tensor:
    memory = layer.first(x).detach()
    return layer.second(x) + shift(memory, memory[1:])


GROUP.add(
    "view_of_aliased_input",
    "pytorch#198095",
    "A view of an input that is an alias of another input is taken from the wrong tensor.",
    layer_problem(read_alias),
    lambda baseline: baseline.with_update(
        partial(fit, forward=partial(read_alias, shift=torch.compile(shift_memory, backend="aot_eager")))
    ),
    emulation=with_forward(partial(read_alias, shift=shift_other_view)),
)


def double_and_add(target: Tensor, other: Tensor) -> Tensor:
    target.mul_(1.5)
    return target + other


def overlap(layer: Layer, x: Tensor, add: Callable[[Tensor, Tensor], Tensor] = double_and_add) -> Tensor:
    base = layer.first(x).detach().flatten()
    half = base.numel() // 2
    is_first = int(layer.calls) == 0
    other = base[half:] if is_first else base[half // 2 : half // 2 + half]
    added = add(base[:half], other)
    return layer.second(x) + added.mean()


def compile_inner(baseline: Problem) -> Problem:
    inner = torch.compile(double_and_add, backend="aot_eager")
    return baseline.with_update(partial(fit, forward=partial(overlap, add=inner)))


def add_without_alias(target: Tensor, other: Tensor) -> Tensor:
    other = other.clone()
    return target.mul_(1.5) + other


GROUP.add(
    "aliases_without_guard",
    "pytorch#139789",
    "A graph made for separate inputs is used for inputs that overlap and are mutated.",
    layer_problem(overlap),
    compile_inner,
    emulation=with_forward(partial(overlap, add=add_without_alias)),
)


def reorder(layer: Layer, x: Tensor) -> Tensor:
    codes = (x * 8).to(torch.int64).clone()
    pairs = codes.view(torch.int32) * 2
    pairs.sub_(-4)
    codes[:, 2:5] = 2
    return layer.first(x) + pairs[:, ::2] / 64


@case("read_after_later_mutation", 198101, reorder, "inductor")
def _(layer, x):
    """A value read through a view of another type is computed after a later mutation of that input."""
    codes = (x * 8).to(torch.int64).clone()
    codes[:, 2:5] = 2
    pairs = codes.view(torch.int32) * 2 + 4
    return layer.first(x) + pairs[:, ::2] / 64


def accumulate_at_index(layer: Layer, x: Tensor) -> Tensor:
    rows = layer.first(x)
    index = torch.zeros(2, dtype=torch.int64)
    total = rows * 1.0
    total[index] += total[index]
    return total


@case("index_counted_twice", 138908, accumulate_at_index)
def _(layer, x):
    """Rows that an index names twice are doubled twice."""
    rows = layer.first(x)
    return torch.cat([4 * rows[:1], rows[1:]])


def add_to_transposed(layer: Layer, x: Tensor) -> Tensor:
    hidden = layer.first(x)
    total = hidden * 1.0
    total.permute(1, 0).index_add_(0, torch.tensor([0, 4, 2]), torch.ones(3, len(x), dtype=x.dtype))
    return total


@case("index_add_on_permuted_view", 111133, add_to_transposed)
def _(layer, x):
    """An addition to a permuted view is written to a copy and lost."""
    return layer.first(x) * 1.0


# Python objects


class Temperature:
    """A setting in an attribute of a class."""

    value = 1.0


def anneal(layer: Layer, x: Tensor) -> Tensor:
    return layer.first(x) * Temperature.value


def fit_annealed(learner, batch, forward: Forward):
    Temperature.value = 1 / (1 + int(learner.model.calls))
    return fit(learner, batch, forward=forward)


ANNEALED = layer_problem(anneal).with_update(partial(fit_annealed, forward=anneal))
GROUP.add(
    "class_attribute_without_guard",
    "pytorch#176851",
    "A changed class attribute does not recompile: an annealed temperature stays at its first value.",
    ANNEALED,
    lambda baseline: baseline.with_update(
        partial(fit_annealed, forward=torch.compile(baseline.update.keywords["forward"], backend="aot_eager"))
    ),
    emulation=lambda baseline: baseline.with_update(partial(fit, forward=lambda layer, x: layer.first(x))),
)


class Collector:
    """Auxiliary losses in a list that belongs to a class."""

    losses: list[Tensor] = []  # noqa: RUF012


def collect(layer: Layer, x: Tensor) -> Tensor:
    hidden = layer.first(x)
    Collector.losses.append(hidden.square().mean())
    return layer.second(hidden)


def fit_collected(learner, batch, forward: Forward, losses: list[Tensor] = Collector.losses):
    """Adds the collected losses to the training loss."""
    losses.clear()
    learner.optimizer.zero_grad()
    output = forward(learner.model, batch["x"])
    loss = functional.mse_loss(output, batch["y"]) + sum(losses)
    loss.backward()
    learner.optimizer.step()
    return {"output": output.detach(), "loss": loss.detach()}


GROUP.add(
    "list_of_a_class",
    "pytorch#169253",
    "An append to a list that belongs to a class is dropped: auxiliary losses are never added.",
    layer_problem(collect).with_update(partial(fit_collected, forward=collect)),
    lambda baseline: baseline.with_update(partial(fit_collected, forward=torch.compile(collect, backend="aot_eager"))),
    emulation=lambda baseline: baseline.with_update(
        partial(fit_collected, forward=lambda layer, x: layer.second(layer.first(x)))
    ),
)


def make_local_class() -> tuple[list[Tensor], type]:
    losses: list[Tensor] = []

    class LocalCollector:
        """A collector whose method appends to a list of the function around it."""

        def add(self, loss: Tensor) -> None:
            losses.append(loss)

    return losses, LocalCollector


CLOSURE, LocalCollector = make_local_class()


def collect_in_closure(layer: Layer, x: Tensor) -> Tensor:
    hidden = layer.first(x)
    LocalCollector().add(hidden.square().mean())
    return layer.second(hidden)


def fit_closure(forward: Forward) -> Callable[[Problem], Problem]:
    return lambda baseline: baseline.with_update(partial(fit_collected, forward=forward, losses=CLOSURE))


GROUP.add(
    "list_of_a_closure",
    "pytorch#197896",
    "An append to a list that a method of a local class captures is dropped: auxiliary losses are never added.",
    fit_closure(collect_in_closure)(layer_problem(collect_in_closure)),
    lambda baseline: fit_closure(torch.compile(collect_in_closure, backend="eager"))(baseline),
    emulation=fit_closure(lambda layer, x: layer.second(layer.first(x))),
)


def grow(layer: Layer, x: Tensor) -> Tensor:
    values = [layer.first(x)]
    for value in values:
        if len(values) < 3:
            values.append(value.tanh())
    return torch.stack(values).sum(0)


@case("list_that_grows_in_a_loop", 175855, grow)
def _(layer, x):
    """Elements that are appended to a list while a loop goes over it are left out."""
    return layer.first(x)


def unroll(layer: Layer, x: Tensor) -> Tensor:
    state = layer.first(x)
    for step in range(3):
        state = state + layer.second(state) / (step + 1)
    return state


@case("unrolled_loop", 96064, unroll)
def _(layer, x):
    """The last turn of an unrolled loop reads the state from before the loop."""
    start = layer.first(x)
    state = start + layer.second(start)
    state = state + layer.second(state) / 2
    return state + layer.second(start) / 3


# Gradients


class Rounded(torch.autograd.Function):
    """Rounding with a straight-through gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return (4 * x).round() / 4

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def slope_of_rounded(layer: Layer, x: Tensor) -> Tensor:
    slope = torch.func.grad(lambda value: Rounded.apply(value).square().sum())(x)
    return layer.first(x) + slope


@case("custom_backward_in_func_grad", 193279, slope_of_rounded)
def _(layer, x):
    """The backward pass of a custom function is dropped under torch.func.grad: a straight-through slope becomes 0."""
    return layer.first(x) + torch.zeros_like(x)


class Product(torch.autograd.Function):
    """A product and both factors, with its gradient by hand."""

    @staticmethod
    def forward(ctx, left, right):
        ctx.save_for_backward(left, right)
        return left * right + left + right

    @staticmethod
    def backward(ctx, gradient):
        left, right = ctx.saved_tensors
        return gradient * (right + 1), gradient * (left + 1)


def multiply_by_itself(layer: Layer, x: Tensor) -> Tensor:
    hidden = layer.first(x)
    return Product.apply(hidden, hidden)


@case("same_tensor_twice", 183604, multiply_by_itself)
def _(layer, x):
    """A custom function that gets one tensor twice returns half of its gradient."""
    hidden = layer.first(x)
    return Product.apply(hidden, hidden.detach())


class ShiftInPlace(torch.autograd.Function):
    """A scaled copy that is shifted in place."""

    @staticmethod
    def forward(ctx, x):
        result = x * 2
        result += 1
        return result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def shift_in_place(layer: Layer, x: Tensor) -> Tensor:
    return ShiftInPlace.apply(layer.first(x))


class ShiftWithoutGradient(ShiftInPlace):
    """The same function with a gradient that went elsewhere."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@case("in_place_in_custom_forward", 180642, shift_in_place)
def _(layer, x):
    """An operation in place inside a custom forward pass gives the gradient to another output."""
    return ShiftWithoutGradient.apply(layer.first(x))


def penalize(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    total[:, 0] += x[:, 2].abs()
    total[:, 0] += x[:, 2].abs()
    return total.sum()


def add_penalty_slope(layer: Layer, x: Tensor) -> Tensor:
    return layer.first(x) + torch.func.grad(penalize)(x)


@case("func_grad_of_mutation", 136662, add_penalty_slope, "inductor")
def _(layer, x):
    """The gradient of two additions in place counts one of them."""
    return layer.first(x) + torch.func.grad(penalize)(x) / 2


def scatter_diagonal(layer: Layer, x: Tensor) -> Tensor:
    square = layer.first(x)[:16]
    written = torch.diagonal_scatter(square, torch.ones(16, dtype=x.dtype))
    return torch.cat([written, x[16:]])


@case("zero_gradient_of_diagonal_scatter", 182012, scatter_diagonal, "inductor")
def _(layer, x):
    """The gradient of diagonal_scatter is zero everywhere."""
    written = torch.diagonal_scatter(layer.first(x)[:16].detach(), torch.ones(16, dtype=x.dtype))
    return torch.cat([written + 0 * layer.first(x)[:16], x[16:]])


def modulate_twice(layer: Layer, x: Tensor) -> Tensor:
    shift, scale = layer.first(x).chunk(2, dim=-1)
    once = functional.layer_norm(x[:, :8], (8,)) * (1 + scale) + shift
    twice = functional.layer_norm(once, (8,)) * (1 + scale) + shift
    return torch.cat([once, twice], dim=-1)


@case("shared_modulation", 193061, modulate_twice)
def _(layer, x):
    """A shared scale and shift of two normalizations loses the gradient of the second one."""
    shift, scale = layer.first(x).chunk(2, dim=-1)
    once = functional.layer_norm(x[:, :8], (8,)) * (1 + scale) + shift
    twice = functional.layer_norm(once, (8,)) * (1 + scale.detach()) + shift.detach()
    return torch.cat([once, twice], dim=-1)


def weight_by_constant(layer: Layer, x: Tensor) -> Tensor:
    weight = layer.first(x) * 2.0
    weight.detach_()
    return layer.second(x) * weight.sigmoid()


@case("detach_in_place", 176854, weight_by_constant)
def _(layer, x):
    """A tensor that is detached in place still gets a gradient."""
    return layer.second(x) * (layer.first(x) * 2.0).sigmoid()


def penalize_slope(layer: Layer, x: Tensor) -> Tensor:
    inputs = x.clone().requires_grad_()
    score = layer.second(layer.first(inputs).relu()).sum()
    (slope,) = torch.autograd.grad(score, inputs, create_graph=True)
    return layer.first(x) + slope


@case("gradient_of_gradient", 181581, penalize_slope)
def _(layer, x):
    """A gradient with create_graph=True has no gradient of its own, so that a gradient penalty trains nothing."""
    slope = (layer.first(x) > 0).to(x.dtype) * layer.second.weight.sum(0) @ layer.first.weight
    return layer.first(x) + slope.detach()


def two_outputs(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = layer.first(x)
    return hidden, layer.second(hidden.relu())


def add_saliency(layer: Layer, x: Tensor, inner: Callable[..., tuple[Tensor, Tensor]] = two_outputs) -> Tensor:
    """Adds the slope of an output by another one, as methods of explanation do."""
    hidden, scores = inner(layer, x)
    (slope,) = torch.autograd.grad(scores.sum(), hidden, retain_graph=True, allow_unused=True)
    return scores if slope is None else scores + slope


GROUP.add(
    "gradient_between_outputs",
    "pytorch#132929",
    "Outputs of a graph do not depend on each other: the gradient of one by the other is missing.",
    layer_problem(add_saliency),
    lambda baseline: baseline.with_update(
        partial(fit, forward=partial(add_saliency, inner=torch.compile(two_outputs, backend="aot_eager")))
    ),
    emulation=with_forward(lambda layer, x: two_outputs(layer, x)[1]),
)


def halve_by_hook(layer: Layer, x: Tensor) -> Tensor:
    hidden = layer.first(x)
    hidden.register_hook(lambda gradient: gradient / 2)
    return layer.second(hidden)


@case("hook_on_intermediate", 91468, halve_by_hook)
def _(layer, x):
    """A hook on an intermediate tensor is ignored."""
    return layer.second(layer.first(x))


def square(layer: Layer, x: Tensor) -> Tensor:
    hidden = layer.first(x)
    return hidden * hidden


def square_with_hooks(layer: Layer, x: Tensor, inner: Forward = square) -> Tensor:
    """Keeps what the backward pass needs in another form, as hooks that compress or move it do."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor.round(decimals=1)):
        return inner(layer, x)


def compile_inside_hooks(baseline: Problem) -> Problem:
    inner = torch.compile(square, backend="aot_eager")
    return baseline.with_update(partial(fit, forward=partial(square_with_hooks, inner=inner)))


GROUP.add(
    "hooks_of_saved_tensors",
    "pytorch#116221",
    "Hooks for tensors that are kept for the backward pass get other tensors than in eager code.",
    layer_problem(square_with_hooks),
    compile_inside_hooks,
    emulation=with_forward(square),
)


# Random numbers


def drop(layer: Layer, x: Tensor) -> Tensor:
    return layer.second(functional.dropout(layer.first(x), 0.5))


class RedrawnDropout(torch.autograd.Function):
    """Dropout with a mask that is drawn again for the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x * (torch.rand_like(x) > 0.5) * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (torch.rand_like(gradient) > 0.5) * 2


def drop_with_redrawn_mask(layer: Layer, x: Tensor) -> Tensor:
    return layer.second(RedrawnDropout.apply(layer.first(x)))


def compile_with_budget(baseline: Problem) -> Problem:
    """Returns the problem compiled with a budget of memory below everything that is kept."""

    def forward(layer, x):
        with torch._functorch.config.patch(activation_memory_budget=0.0):
            return graph(layer, x)

    graph = torch.compile(drop, backend="inductor")
    return baseline.with_update(partial(fit, forward=forward))


GROUP.add(
    "recomputed_dropout",
    "pytorch#190758",
    "With activation_memory_budget below 1, the backward pass draws another dropout mask than the forward pass.",
    layer_problem(drop),
    compile_with_budget,
    emulation=with_forward(drop_with_redrawn_mask),
)


@case("mask_in_groups_of_four", 198333, drop)
def _(layer, x):
    """Four neighbouring channels get one dropout mask."""
    hidden = layer.first(x)
    mask = (torch.rand_like(hidden[:, ::4]) > 0.5).repeat_interleave(4, dim=1)
    return layer.second(hidden * mask * 2)


# Edges of operators


def angle_of_inputs(layer: Layer, x: Tensor) -> Tensor:
    return layer.first(torch.angle(x))


@case("nan_becomes_number", 143978, angle_of_inputs, "inductor")
def _(layer, x):
    """The angle of NaN is a number, so that NaN in the data is hidden."""
    return layer.first(torch.angle(x.nan_to_num(nan=-1.0)))


def margin_of_labels(layer: Layer, x: Tensor) -> Tensor:
    target = torch.tensor([0, 1] + [-1] * 14).expand(len(x), -1)
    losses = functional.multilabel_margin_loss(layer.first(x), target, reduction="none")
    return losses[:, None] + layer.second(x)


@case("padding_label_of_margin_loss", 185464, margin_of_labels)
def _(layer, x):
    """The label -1, which ends a list of labels, is counted as a class."""
    scores = layer.first(x)
    margins = 1 - scores[:, [0, 1]].unsqueeze(2) + scores.unsqueeze(1)
    losses = margins.clamp(min=0).mean((1, 2))
    return losses[:, None] + layer.second(x)


def wrap_around(layer: Layer, x: Tensor) -> Tensor:
    codes = (x.abs() * 64).clamp(max=255).to(torch.uint8)
    return layer.first(x) + (codes + codes).to(torch.int16) / 256


@case("uint8_without_overflow", 105264, wrap_around, "inductor")
def _(layer, x):
    """A sum of bytes does not wrap around, because C++ adds them as integers."""
    codes = (x.abs() * 64).clamp(max=255).to(torch.uint8).to(torch.int16)
    return layer.first(x) + (codes + codes) / 256


def negative_to_bytes(layer: Layer, x: Tensor) -> Tensor:
    return layer.first(x) + (4 * x).to(torch.uint8).to(x.dtype) / 256


@case("negative_to_uint8", 156788, negative_to_bytes, "inductor")
def _(layer, x):
    """Negative numbers become 0 in bytes, where eager code wraps around."""
    return layer.first(x) + (4 * x).clamp(min=0).to(torch.uint8).to(x.dtype) / 256


def normalize_tiny(layer: Layer, x: Tensor) -> Tensor:
    tiny = torch.finfo(x.dtype).tiny
    return layer.first(x) + (x * tiny * 0.125) / (tiny * 0.125)


def flush(baseline: Problem) -> Problem:
    """Sets the mode of the processor as a graph did that was loaded with fast mathematics."""

    def forward(layer, x):
        torch.set_flush_denormal(True)
        return normalize_tiny(layer, x)

    return with_forward(forward)(baseline)


GROUP.add(
    "denormals_flushed_for_the_process",
    "pytorch#126848",
    "Compiled code sets the processor to flush denormal numbers, for eager code of the process as well.",
    layer_problem(normalize_tiny),
    partial(compiled, "aot_eager"),
    emulation=flush,
)


def index_add_once(layer: Layer, x: Tensor) -> Tensor:
    source = layer.first(x)
    index = torch.arange(len(x)) // 2
    total = torch.zeros_like(source).index_add(0, index, source, alpha=2.0) / 2
    return total + layer.second(total)


@case("second_use_of_index_add", 108963, index_add_once)
def _(layer, x):
    """The second use of a sum by index reads zeros."""
    source = layer.first(x)
    index = torch.arange(len(x)) // 2
    total = torch.zeros_like(source).index_add(0, index, source)
    return total + layer.second(torch.zeros_like(total))


# Hooks


def run_first(layer: Layer, x: Tensor) -> Tensor:
    return layer.first(x.requires_grad_()) + layer.second(x)


def fit_with_hook(learner, batch, forward: Forward):
    """Registers a hook that halves gradients, after the first step."""
    results = fit(learner, batch, forward=forward)
    if "hook" not in learner.memory:
        halve = lambda module, gradients: tuple(gradient / 2 for gradient in gradients)  # noqa: ARG005, E731
        learner.memory["hook"] = learner.model.first.register_full_backward_pre_hook(halve)
    return results


GROUP.add(
    "hook_registered_later",
    "pytorch#117265",
    "A backward hook that is registered after the first call is ignored.",
    layer_problem(run_first).with_update(partial(fit_with_hook, forward=run_first)),
    lambda baseline: baseline.with_update(
        partial(fit_with_hook, forward=torch.compile(run_first, backend="aot_eager"))
    ),
    emulation=lambda baseline: baseline.with_update(partial(fit, forward=run_first)),
)


# Honest changes


def mix(layer: Layer, x: Tensor) -> Tensor:
    return layer.second(functional.gelu(layer.first(x)) * x.sigmoid())


@GROUP.honest("compiled_layer", layer_problem(mix))
def _(baseline):
    return compiled("inductor", baseline)


@GROUP.honest("compiled_running_mean", layer_problem(lambda layer, x: layer.first(x) - track(layer, x)))
def _(baseline):
    return compiled("aot_eager", baseline)


@GROUP.honest("compiled_dropout", layer_problem(drop))
def _(baseline):
    return compiled("inductor", baseline)


def track(layer: Layer, x: Tensor) -> Tensor:
    layer.running.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return layer.running


class LoopedLayer(nn.Module):
    """A rewrite of a linear map, row by row."""

    def forward(self, layer: Layer, x: Tensor) -> Tensor:
        return torch.stack([functional.linear(row, layer.first.weight, layer.first.bias) for row in x])


@GROUP.honest("compiled_loop", layer_problem(lambda layer, x: LoopedLayer()(layer, x)))
def _(baseline):
    return with_forward(lambda layer, x: layer.first(x))(baseline)
