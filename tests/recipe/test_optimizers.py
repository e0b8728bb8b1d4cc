"""The sections ``optimizer`` and ``lr_scheduler``: what they mean, and what is said of those that mean nothing."""

import inspect
import json

import pytest
import torch
from faces import RECIPE, FakeCatalog, Net, write_recipe
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from runner.api import Context, GradientLearner, Slots, UsageError
from runner.plugin.lr_scheduler import SCHEDULES
from runner.plugin.optimizer import IMPLEMENTATION_SETTINGS, RUNNER_SETTINGS, SPARED, kinds, settings_of
from runner.recipe.dumping import dump_inline
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError

PAIR = RECIPE.replace("kind: net", "kind: pair")


def loaded(folder, section=None, text=RECIPE, key="optimizer"):
    text += "" if section is None else f"{key}: {section}\n"
    return load(write_recipe(folder, text), (), FakeCatalog())


def optimizer(folder, section=None):
    """The optimizer of a learner with one role."""
    return loaded(folder, section).optimizer["model"]


def complaint(folder, section, text=RECIPE, key="optimizer"):
    """What is wrong, as ``column path: message``."""
    with pytest.raises(RecipeError) as caught:
        loaded(folder, section, text, key)
    return [f"{problem.place.column} {problem.path}: {problem.message}" for problem in caught.value.problems]


def test_one_section_is_for_all_roles(tmp_path):
    found = loaded(tmp_path, "{kind: adamw, lr: 0.5, betas: [0.8, 0.9], max_grad_norm: 2}", PAIR).optimizer
    assert list(found) == ["generator", "discriminator"]
    assert found["generator"] == found["discriminator"]
    assert found["generator"].kind == "adamw"
    assert found["generator"].lr == 0.5
    assert found["generator"].settings["betas"] == (0.8, 0.9)
    assert found["generator"].max_grad_norm == 2.0


def test_roles_may_have_optimizers_of_their_own(tmp_path):
    section = "{generator: {lr: 0.5}, discriminator: {kind: rmsprop, alpha: 0.5}}"
    found = loaded(tmp_path, section, PAIR).optimizer
    assert (found["generator"].kind, found["generator"].lr) == ("adam", 0.5)
    assert found["generator"].settings["betas"] == (0.5, 0.999)  # the learner's own, where the recipe says nothing
    assert found["discriminator"].kind == "rmsprop"
    assert found["discriminator"].settings["alpha"] == 0.5


def test_a_role_that_is_not_named_keeps_the_learners_own_optimizer(tmp_path):
    found = loaded(tmp_path, "{generator: {lr: 0.5}}", PAIR).optimizer["discriminator"]
    assert (found.kind, found.lr, found.max_grad_norm) == ("sgd", 0.1, 1.0)
    assert loaded(tmp_path, None, PAIR).optimizer["discriminator"] == found


def test_another_kind_leaves_the_scales_of_the_learners_own_behind(tmp_path):
    found = loaded(tmp_path, "{discriminator: {kind: adam}}", PAIR).optimizer["discriminator"]
    assert found.lr == settings_of("adam")().lr
    assert found.max_grad_norm == 1.0


@pytest.mark.parametrize("section", ["{lr: 0.5, generator: {lr: 1.0}}", "{generator: {lr: 1.0}, lr: 0.5}"])
def test_both_ways_at_once_are_an_error_that_says_what_to_write(tmp_path, section):
    (found,) = complaint(tmp_path, section, PAIR)
    assert found.endswith(
        "optimizer.lr: settings are given for each role here; write optimizer.generator.lr, optimizer.discriminator.lr"
    )


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("adam", "12 optimizer: should be a mapping with a kind, got 'adam'"),
        ("{kind: adamm}", "19 optimizer.kind: unknown kind 'adamm' - did you mean 'adam'?"),
        ("{lrr: 1}", "13 optimizer.lrr: unknown key - did you mean 'lr'?"),
        (
            "{kind: sgd, max_gradnorm: 1}",
            "24 optimizer.max_gradnorm: unknown key - did you mean 'max_grad_norm'?",
        ),
        ("{lr: '1e-3'}", "17 optimizer.lr: should be a number, got '1e-3' - remove the quotes"),
        ("{lr: on}", "17 optimizer.lr: should be a number, got 'on'"),
        ("{lr: true}", "17 optimizer.lr: should be a number, got true"),
        ("{lr: .inf}", "17 optimizer.lr: should be a finite number, got .inf"),
        ("{lr: -1.0}", "17 optimizer.lr: should not be below 0"),
        ("{lr: }", "16 optimizer.lr: should be a number, got nothing"),
        ("{betas: 0.9}", "20 optimizer.betas: should be a list, got 0.9"),
        ("{betas: [0.9]}", "20 optimizer.betas: needs at least 2 items"),
        ("{betas: [0.9, x]}", "26 optimizer.betas.1: should be a number, got 'x'"),
        ("{betas: [0.9, null]}", "26 optimizer.betas.1: should be a number, got nothing"),
        ("{amsgrad: 1}", "22 optimizer.amsgrad: should be true or false, got 1"),
        ("{kind: muon, ns_steps: 1.5}", "35 optimizer.ns_steps: should be an integer, got 1.5"),
        ("{kind: muon, adjust_lr_fn: 1}", "39 optimizer.adjust_lr_fn: should be text, got 1"),
        ("{max_grad_norm: 0}", "28 optimizer.max_grad_norm: should be greater than 0, got 0"),
        ("{max_grad_norm: x}", "28 optimizer.max_grad_norm: should be a number, got 'x'"),
        ("{spare: biases}", "20 optimizer.spare: should be a list, got 'biases'"),
        ("{spare: [w]}", "21 optimizer.spare.0: should be 'biases', 'norms' or 'embeddings', got 'w'"),
    ],
)
def test_a_mistake_is_one_line_that_points_at_it(tmp_path, section, expected):
    assert complaint(tmp_path, section) == [expected]


@pytest.mark.parametrize("key", IMPLEMENTATION_SETTINGS)
def test_how_to_compute_is_for_stages(tmp_path, key):
    (found,) = complaint(tmp_path, f"{{{key}: true}}")
    assert found.startswith(f"13 optimizer.{key}: selects an implementation, which is the task of stages")


def test_a_mistake_in_one_section_for_all_roles_is_said_once(tmp_path):
    assert len(complaint(tmp_path, "{kind: adam, lr: x}", PAIR)) == 1


def test_a_mistake_in_a_role_names_the_role(tmp_path):
    (found,) = complaint(tmp_path, "{discriminator: {lr: x}}", PAIR)
    assert found.endswith("optimizer.discriminator.lr: should be a number, got 'x'")


# --- every kind -------------------------------------------------------------------------------------------------------


def test_the_kinds_are_those_of_torch():
    own = {name.lower() for name, each in vars(torch.optim).items() if isinstance(each, type)}
    assert set(kinds()) == own - {"optimizer", "lbfgs"}


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_is_made_with_its_defaults_and_steps(tmp_path, kind):
    settings = optimizer(tmp_path, f"{{kind: {kind}}}")
    weight = nn.Parameter(torch.ones(2, 2))
    found = settings.optimizer()([weight], **settings.settings)
    plain = settings.optimizer()([nn.Parameter(torch.ones(2, 2))])
    assert {**found.defaults, "foreach": None} == {**plain.defaults, "foreach": None}
    weight.grad = torch.ones(2, 2).to_sparse() if kind == "sparseadam" else torch.ones(2, 2)
    found.step()
    assert (weight < 1).any()


@pytest.mark.parametrize("kind", kinds())
def test_a_lock_says_the_same_optimizer_again(tmp_path, kind):
    recipe = loaded(tmp_path, f"{{kind: {kind}}}")
    again = load(write_recipe(tmp_path, json.dumps(recipe.values()), "again.yaml"), (), FakeCatalog())
    assert again.optimizer == recipe.optimizer
    assert again.digest == recipe.digest


@pytest.mark.parametrize("kind", kinds())
def test_every_setting_of_torch_may_be_given_but_those_that_say_how_to_compute(kind):
    (actual,) = (each for name, each in vars(torch.optim).items() if name.lower() == kind and isinstance(each, type))
    given = {name: each.default for name, each in inspect.signature(actual).parameters.items()}
    known = {name: given[name] for name in given.keys() - {"params", *IMPLEMENTATION_SETTINGS}}
    assert {
        name: each.default for name, each in settings_of(kind).model_fields.items() if name not in RUNNER_SETTINGS
    } == known


def test_what_torch_refuses_is_one_message(tmp_path):
    settings = optimizer(tmp_path, "{kind: sgd, nesterov: true}")
    with pytest.raises(UsageError, match=r"optimizer: torch\.optim\.SGD refuses .*[Nn]esterov"):
        configured(settings, nn.Linear(1, 1))


# --- weight decay -----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.hidden = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)
        self.scale = nn.Parameter(torch.ones(2))
        self.attention = nn.MultiheadAttention(2, 1, add_bias_kv=True)
        self.recurrent = nn.LSTM(2, 2, bidirectional=True, proj_size=1)
        self.cell = nn.GRUCell(2, 2)


def configured(settings, module):
    """The optimizer of a role with that module."""

    class Works(GradientLearner):
        def build(self, config, shapes, context):
            return module

        def loss(self, batch, noise, progress):
            raise AssertionError("never trained")

    learner = Works(Net(), {}, Context(torch.device("cpu"), Slots(), 0, optimizers={"model": settings}))
    learner.configure_optimizers()
    ((_, found),) = learner.optimizers()
    return found


def decayed(settings, module):
    """Names of the parameters that weight decay pulls at."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = configured(settings, module).param_groups
    assert sorted(names[id(each)] for group in groups for each in group["params"]) == sorted(names.values())
    return {names[id(each)] for group in groups if group["weight_decay"] for each in group["params"]}


WEIGHTS = {"hidden.weight", "attention.in_proj_weight", "attention.out_proj.weight"}
WEIGHTS |= {f"recurrent.weight_{kind}_l0{way}" for kind in ("ih", "hh", "hr") for way in ("", "_reverse")}
WEIGHTS |= {"cell.weight_ih", "cell.weight_hh"}
BIASES = {"hidden.bias", "norm.bias", "attention.in_proj_bias", "attention.out_proj.bias"}
BIASES |= {f"recurrent.bias_{kind}_l0{way}" for kind in ("ih", "hh") for way in ("", "_reverse")}
BIASES |= {"cell.bias_ih", "cell.bias_hh", "attention.bias_k", "attention.bias_v"}
NORMS = {"norm.weight", "scale"}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{weight_decay: 0.1}", WEIGHTS),
        ("{weight_decay: 0.1, spare: [biases]}", WEIGHTS | NORMS | {"embedding.weight"}),
        ("{weight_decay: 0.1, spare: [norms, embeddings]}", WEIGHTS | BIASES),
        ("{weight_decay: 0.1, spare: []}", WEIGHTS | BIASES | NORMS | {"embedding.weight"}),
        ("{weight_decay: 0.0}", set()),
        ("{kind: sgd, weight_decay: 0.1}", WEIGHTS),
    ],
)
def test_weight_decay_spares_biases_norms_and_embeddings_unless_told(tmp_path, section, expected):
    assert decayed(optimizer(tmp_path, section), Model()) == expected


def test_what_needs_no_gradient_is_not_optimized(tmp_path):
    module = Model()
    module.embedding.requires_grad_(False)
    before = module.embedding.weight.clone()
    found = configured(optimizer(tmp_path, "{lr: 0.5, weight_decay: 0.1, spare: []}"), module)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    found.step()
    assert torch.equal(module.embedding.weight, before)
    assert {id(parameter) for parameter in found.state} == {
        id(parameter) for parameter in module.parameters() if parameter.requires_grad
    }


def test_spared_parameters_stay_where_they_are_without_a_gradient(tmp_path):
    module = Model()
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    found = configured(optimizer(tmp_path, "{lr: 0.5, weight_decay: 0.1}"), module)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found.step()
    moved = {name for name, each in module.named_parameters() if not torch.equal(each, before[name])}
    assert moved == WEIGHTS


@given(st.lists(st.sampled_from(SPARED), unique=True))
def test_no_parameter_is_lost_whatever_is_spared(tmp_path_factory, spare):
    section = f"{{weight_decay: 0.1, spare: {dump_inline(spare)}}}"
    decayed(optimizer(tmp_path_factory.mktemp("spare"), section), Model())


# --- learning rates ---------------------------------------------------------------------------------------------------


def test_the_learning_rate_is_constant_unless_told(tmp_path):
    assert loaded(tmp_path).lr_scheduler == SCHEDULES["constant"]()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_is_filled_in_and_says_itself_again(tmp_path, kind):
    settings = {"warmup": 0.25}
    if kind == "plateau":
        settings |= {"metric": "eval/loss", "direction": "minimize"}
    section = dump_inline({"kind": kind, **settings})
    text = RECIPE.replace("env_steps: 60_000", "{env_steps: 60_000, evaluate_every: 60}").replace(
        "train:\n  ", "train: "
    )
    recipe = loaded(tmp_path, section, text, key="lr_scheduler")
    assert recipe.lr_scheduler == SCHEDULES[kind](**settings)
    assert recipe.origins["lr_scheduler.warmup"].line == text.count("\n") + 1
    again = load(write_recipe(tmp_path, json.dumps(recipe.values()), "again.yaml"), (), FakeCatalog())
    assert again.lr_scheduler == recipe.lr_scheduler


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("cosine", "15 lr_scheduler: should be a mapping with a kind, got 'cosine'"),
        (
            "{}",
            "1 lr_scheduler.kind: is missing: one of constant, cosine, cosine_restarts, inverse_sqrt, linear, "
            "one_cycle, plateau, polynomial, step",
        ),
        (
            "{kind: cosin}",
            "22 lr_scheduler.kind: unknown kind 'cosin' - did you mean 'cosine'?; --plugin FILE adds the "
            "plugins of a file",
        ),
        (
            "{kind: qqq}",
            "22 lr_scheduler.kind: unknown kind 'qqq' - known: constant, cosine, cosine_restarts, inverse_sqrt, "
            "linear, one_cycle, plateau, polynomial, step; --plugin FILE adds the plugins of a file",
        ),
        ("{kind: cosine, flor: 0.1}", "30 lr_scheduler.flor: unknown key - did you mean 'floor'?"),
        ("{kind: cosine, floor: 2.0}", "37 lr_scheduler.floor: should be less than or equal to 1, got 2.0"),
        ("{kind: cosine, warmup: 1.0}", "38 lr_scheduler.warmup: should be less than 1, got 1.0"),
    ],
)
def test_a_mistake_in_a_schedule_is_one_line_that_points_at_it(tmp_path, section, expected):
    assert complaint(tmp_path, section, key="lr_scheduler") == [expected]
