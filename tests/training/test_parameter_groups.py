"""Parameter groups of a recipe: what is trained, compared with plain torch, resumed, verified, refused."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import tiny_learners
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from toy_runs import RECIPE, TOYS, toy_pipeline

from runner.plugin.optimizer import settings_of
from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.recipe.loader import load
from runner.recipe.resumption import refuse_fixed
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import UsageError
from runner.training.checkpoint import kept
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.verify.timed_gate import quick

TINY = Path(tiny_learners.__file__)
REGISTRY = Registry([TINY])
DIVIDED = (
    "optimizer={kind: adamw, lr: 0.01, weight_decay: 0.1, layer_decay: 0.5,"
    " groups: {blocks.0: {lr: 0.03, betas: [0.5, 0.9]}, '*.bias': {weight_decay: 0.3, spare: []}}}"
)
SCHEDULE = "lr_scheduler={kind: cosine, warmup: 0.25, floor: 0.1}"


def recipe_of(folder, *sets, learner="images"):
    path = folder / "recipe.yaml"
    head = "name: tiny\nseed: 3\ndevice: cpu\ntracking: {system_metrics: false}\n"
    path.write_text(head + tiny_learners.RECIPES[learner])
    return load(path, ["train.updates=8", *sets], REGISTRY)


def stepped(pipeline, updates):
    step = Step(pipeline)
    while pipeline.progress.updates < updates:
        step()
    return pipeline


def weights(pipeline):
    return dict(pipeline.learner.named_parameters())


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


# --- plain torch ------------------------------------------------------------------------------------------------------


def test_groups_train_as_in_plain_torch_to_the_bit(tmp_path):
    pipeline = assemble(recipe_of(tmp_path, DIVIDED, SCHEDULE, "optimizer.max_grad_norm=0.5"))
    plain = tiny_learners.Convolutions()
    plain.load_state_dict(pipeline.learner.module.state_dict())
    first, second = plain.blocks[0][0], plain.blocks[1][0]
    groups = [
        {"params": [plain.head.weight], "lr": 0.01},
        {"params": [second.weight], "lr": 0.01 * 0.5},
        {"params": [first.weight], "lr": 0.03 * 0.25, "betas": (0.5, 0.9)},
        {"params": [first.bias], "lr": 0.03 * 0.25, "betas": (0.5, 0.9), "weight_decay": 0.0},
        {"params": [plain.head.bias], "lr": 0.01, "weight_decay": 0.3},
        {"params": [second.bias], "lr": 0.01 * 0.5, "weight_decay": 0.3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    rates = [group["lr"] for group in groups]
    step = Step(pipeline)
    for update in range(8):
        drawn = step.next()
        factor = pipeline.recipe.lr_scheduler.multiplier(update / 8)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        optimizer.zero_grad()
        logits = plain(drawn.batch["image"] + drawn.noise["blur"])
        loss = functional.cross_entropy(logits, drawn.batch["label"], reduction="sum") / len(logits)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        step(drawn)
    assert_equal(pipeline.learner.module.state_dict(), plain.state_dict())


def test_roles_have_separate_groups_as_in_plain_torch(tmp_path):
    """The toy generator has one matrix and one vector; the discriminator has another optimizer."""
    path = tmp_path / "pair.yaml"
    section = "{generator: {kind: sgd, lr: 0.1, groups: {weight: {lr: 0.01}}}, discriminator: {kind: sgd, lr: 0.2}}"
    path.write_text(RECIPE.replace("{lr: 1e-2}", section))
    recipe = load(path, ["model={kind: toy_pair, every: 1}", "train.updates=4"], Registry([TOYS]))
    pipeline = assemble(recipe, [TOYS])
    generator = pipeline.learner.generator.module
    before = [parameter.detach().clone() for parameter in generator.parameters()]
    stepped(pipeline, 1)
    for rate, old, parameter in zip((0.01, 0.1), before, generator.parameters(), strict=True):
        assert torch.equal(parameter, old.add(parameter.grad, alpha=-rate))
    names = [group.get("name") for _, each in pipeline.learner.optimizers() for group in each.param_groups]
    assert names == ["default", "weight", None]


# --- any module, any patterns -----------------------------------------------------------------------------------------

LAYERS = st.lists(st.sampled_from(["linear", "norm", "embedding", "nested"]), min_size=1, max_size=4)
PATTERNS = st.lists(
    st.sampled_from(["0", "1.*", "*.bias", "*weight", "?", "*", "[01].weight", "inner", "2.inner.0", "*.0", "x"]),
    unique=True,
    max_size=4,
)


def module_of(layers):
    made = {
        "linear": lambda: nn.Linear(2, 2),
        "norm": lambda: nn.LayerNorm(2),
        "embedding": lambda: nn.Embedding(3, 2),
        "nested": lambda: nn.ModuleDict({"inner": nn.Sequential(nn.Linear(2, 2))}),
    }
    return nn.Sequential(*(made[layer]() for layer in layers))


@given(LAYERS, PATTERNS, st.sampled_from([None, 0.5]), st.sampled_from([0.0, 0.1]))
def test_every_parameter_has_the_settings_of_its_first_pattern(layers, patterns, layer_decay, weight_decay):
    module = module_of(layers)
    groups = {pattern: {"lr": 1.0 + number} for number, pattern in enumerate(patterns)}
    kind = settings_of("adamw")
    values = {"lr": 0.5, "weight_decay": weight_decay, "groups": groups, "layer_decay": layer_decay}
    settings = kind.model_validate(values)
    blocks = list(module)[1:]
    optimizer = torch.optim.AdamW(settings.parameter_groups(module, blocks), **settings.settings)

    actual = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    assert len(actual) == len(list(module.parameters()))
    for name, parameter in module.named_parameters():
        names = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]
        matches = [pattern for pattern in patterns if any(fnmatchcase(each, pattern) for each in names)]
        rate = groups[matches[0]]["lr"] if matches else 0.5
        if layer_decay is not None:
            number = int(name.partition(".")[0])
            rate *= 0.5 ** (len(blocks) + 1 - number) if blocks else 1.0 if not number else 0.0
        group = actual[id(parameter)]
        if blocks or layer_decay is None:
            assert group["lr"] == rate, name
        assert group["weight_decay"] in (weight_decay, 0.0)
        is_matrix = parameter.dim() > 1 and not isinstance(module[int(name[0])], nn.Embedding)
        assert group["weight_decay"] == (weight_decay if is_matrix else 0.0)


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["linear", "cosine", "cosine_restarts", "polynomial", "inverse_sqrt", "step", "one_cycle"]
)
def test_every_schedule_scales_the_rate_of_every_group(kind, tmp_path):
    pipeline = assemble(recipe_of(tmp_path, DIVIDED, f"lr_scheduler.kind={kind}"))
    bases = [rate for rates in pipeline.base_rates for rate in rates]
    assert len(set(bases)) > 2
    for update in range(8):
        stepped(pipeline, update + 1)
        factor = pipeline.recipe.lr_scheduler.multiplier(update / 8)
        rates = [group["lr"] for _, each in pipeline.learner.optimizers() for group in each.param_groups]
        assert rates == [base * factor for base in bases]


# --- resumption -------------------------------------------------------------------------------------------------------


def resumed(folder, state, *sets):
    pipeline = assemble(recipe_of(folder, *sets), resumed=state)
    pipeline.load_state_dict(state)
    return pipeline


def test_a_resumed_training_is_the_same_to_the_bit(tmp_path):
    pipeline = stepped(assemble(recipe_of(tmp_path, DIVIDED, SCHEDULE)), 3)
    state = kept(pipeline.state_dict())
    continued = resumed(tmp_path, state, DIVIDED, SCHEDULE)
    assert_equal(weights(stepped(continued, 8)), weights(stepped(pipeline, 8)))


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ("optimizer.groups.blocks.0.lr=0.04", "lr", 0.04 * 0.25),
        ("optimizer.groups.blocks.0.betas=[0.1, 0.2]", "betas", (0.1, 0.2)),
        ("optimizer.groups.blocks.0.eps=0.1", "eps", 0.1),
        ("optimizer.layer_decay=0.25", "lr", 0.03 * 0.25**2),
    ],
)
def test_settings_of_a_group_are_applied_to_a_resumed_run(change, name, value, tmp_path):
    pipeline = stepped(assemble(recipe_of(tmp_path, DIVIDED)), 3)
    state = kept(pipeline.state_dict())
    refuse_fixed(pipeline.recipe.values(), recipe_of(tmp_path, DIVIDED, change))
    continued = resumed(tmp_path, state, DIVIDED, change)
    (group, *_) = (
        group
        for _, optimizer in continued.learner.optimizers()
        for group in optimizer.param_groups
        if group["name"].startswith("blocks.0/")
    )
    assert group[name] == value
    stepped(continued, 4)


@pytest.mark.parametrize(
    "change",
    [
        "optimizer.groups.head.lr=0.1",
        "optimizer.groups.*.bias.weight_decay=0",
        "optimizer.groups.*.bias.spare=[norms]",
        "optimizer.groups.blocks.0.amsgrad=true",
        "optimizer.layer_decay=null",
        "optimizer={kind: adamw, lr: 0.01}",
    ],
)
def test_other_groups_cannot_be_resumed(change, tmp_path):
    before = recipe_of(tmp_path, DIVIDED).values()
    sets = (DIVIDED, change)
    if change.startswith("optimizer={"):
        sets = (change,)
    with pytest.raises(UsageError, match=r"optimizer\.\w+: .* the parameter groups follow from it"):
        refuse_fixed(before, recipe_of(tmp_path, *sets))


# --- verification -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("migrated_workspace")
def test_stages_are_verified_with_groups(tmp_path):
    stages = ("optimization.fused_optimizer=on", "optimization.gradient_accumulation.micro_batch=3")
    recipe = recipe_of(tmp_path, DIVIDED, SCHEDULE, *stages)
    verdict = quick(recipe, REGISTRY, ["fused_optimizer", "gradient_accumulation"])
    assert verdict.outcome is Outcome.PASS, verdict.summary


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{groups: {haed: {lr: 1}}}", "optimizer.groups.haed: matches no parameter - did you mean 'head'?"),
        (
            "{groups: {zzz: {lr: 1}}}",
            "optimizer.groups.zzz: matches no parameter; the names are blocks.0.0.weight, blocks.0.0.bias, "
            "blocks.1.0.weight, blocks.1.0.bias, head.weight, ...",
        ),
        (
            "{groups: {blocks: {lr: 1}, blocks.1: {lr: 2}}}",
            "optimizer.groups.blocks.1: is never used: 'blocks', which comes first, matches the same",
        ),
        (
            "{groups: {head: {betas: [0.9, 1.5]}}}",
            "optimizer.groups.head: torch.optim.AdamW refuses its settings: Invalid beta parameter at index 1: 1.5",
        ),
        (
            "{layer_decay: 0.5, groups: {'*.bias': {weight_decay: 0.1}}}",
            "optimizer.groups.*.bias.weight_decay: has no effect: spare lists all parameters of the group",
        ),
    ],
)
def test_groups_that_do_not_fit_the_model_are_one_line_with_its_place(section, expected, tmp_path):
    path = tmp_path / "recipe.yaml"
    text = tiny_learners.RECIPES["images"].partition("optimizer:")
    path.write_text(f"name: tiny\n{text[0]}train: {{updates: 2, batch_size: 6}}\noptimizer: {section}\n")
    with pytest.raises(RecipeError) as caught:
        assemble(load(path, (), REGISTRY))
    line = str(caught.value).partition("\n")[0]
    assert line.partition(": ")[2] == expected
    assert line.startswith(f"{path}:5:")
    assert len(caught.value.problems) == 1


def test_decay_by_layers_needs_blocks(tmp_path):
    with pytest.raises(RecipeError, match=r"optimizer\.layer_decay: Toy\.blocks\(\) has no layer of this role"):
        toy_pipeline(tmp_path, "train.updates=1", "optimizer.layer_decay=0.5")


@pytest.mark.parametrize("setting", ["groups.0.lr=0.1", "layer_decay=0.5"])
def test_an_author_who_makes_optimizers_without_groups_does_not_hide_them(setting, tmp_path):
    plugins = [TOYS, TOYS.with_name("annealing.py")]
    path = tmp_path / "toy.yaml"
    path.write_text(
        "name: toy\nmodel: {kind: toy_layered, rates: [0.1, 0.2]}\ndata: {kind: toy_words}\ntrain: {batch_size: 8}\n"
    )
    recipe = load(path, ["train.updates=1", f"optimizer.{setting}"], Registry(plugins))
    message = r"Layered\.configure_optimizers in .*annealing.py:\d+ does not make the groups of role 'model'"
    if setting.startswith("layer_decay"):
        message = r"Layered\.blocks\(\) has no layer of this role"
    with pytest.raises(RecipeError, match=message):
        assemble(recipe, plugins)
