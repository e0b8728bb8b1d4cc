"""Weights of classes in the loss, and samples that are drawn equally often from every class."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from running import tiny
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, Subset, TensorDataset

from runner.api import Context, DatasetConfig, DatasetSource, Slots, TensorRows, UsageError
from runner.plugin.class_balance import ClassWeightsConfig, balanced_order, count_labels, labels_of, weights_of_classes
from runner.plugin.folds import FoldsConfig
from runner.plugin.progress import Progress
from runner.plugin.registry import Registry
from runner.plugin.rows import SelectedRows
from runner.recipe.yaml_nodes import RecipeError
from runner.training.checkpoint import kept
from runner.training.evaluation import evaluated
from runner.training.pipeline import assemble
from runner.training.step import Step

WEIGHTED = {"digits_classifier": (), "gcn_cora": ("model.dropout=0",)}
"""Recipes of classifiers, with settings without which an update is not what an evaluation computes."""
LABELS = torch.tensor([2, 0, 0, -1, 2, 2, 2, 0, 5])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any))
def test_balanced_weights_give_every_class_the_same_share_and_a_mean_of_one(counts):
    weights = weights_of_classes("balanced", counts, len(counts))
    shares = {round(weight * count, 9) for weight, count in zip(weights, counts, strict=True) if count}
    assert len(shares) == 1
    assert sum(map(float.__mul__, weights, map(float, counts))) == pytest.approx(sum(counts))


@pytest.mark.parametrize("seed", range(3))
def test_a_balanced_order_draws_all_classes_equally_often(seed):
    labels = torch.cat([torch.full((count,), number) for number, count in enumerate((4000, 400, 0, 40))])
    order = balanced_order(labels, torch.Generator().manual_seed(seed))
    assert len(order) == len(labels)
    counts = count_labels(labels[order], 4)
    assert counts[2] == 0
    assert all(abs(count - len(labels) / 3) < 5 * len(labels) ** 0.5 for count in counts[:2] + counts[3:])
    assert len(order[labels[order] == 3].unique()) == 40


def test_samples_without_a_class_are_never_drawn_and_not_counted():
    order = balanced_order(LABELS.repeat(200), torch.Generator().manual_seed(0))
    assert LABELS.repeat(200)[order].unique().tolist() == [0, 2, 5]
    assert count_labels(LABELS, 7) == [3, 0, 4, 0, 0, 1, 0]


def test_labels_are_found_in_rows_datasets_and_parts_of_them():
    rows = TensorRows({"label": LABELS, "x": torch.zeros(9, 2)})
    dataset = TensorDataset(torch.zeros(9))
    dataset.targets = LABELS.tolist()
    index = torch.tensor([8, 1])
    assert labels_of(rows, "label").tolist() == LABELS.tolist()
    assert labels_of(SelectedRows(rows, index), "label").tolist() == [5, 0]
    assert labels_of(Subset(dataset, [8, 1]), "label").tolist() == [5, 0]
    for data in (TensorRows({"label": torch.zeros(3)}), TensorRows({"x": LABELS}), TensorDataset(LABELS), iter(())):
        assert labels_of(data, "label") is None


class Wrapped(Dataset):
    """Some samples of a dataset, with an attribute of all of them."""

    def __init__(self, samples, targets):
        self.samples = samples
        self.targets = targets

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return {"x": torch.zeros(2), "label": torch.tensor(index % 2)}


@pytest.mark.parametrize("targets", [["cat", "dog"], [[0, 1], [1, 0]], [0.5, 1.5], [0, [1]], [None, None]])
def test_what_is_no_number_of_a_class_is_no_label(targets):
    assert labels_of(Wrapped(2, targets), "label") is None


class LabelsConfig(DatasetConfig):
    """Samples with labels from elsewhere."""

    kind = "labels"
    implementation = "Missing"
    provides = "rows"


@pytest.mark.parametrize("settings", [{"sampling": "balanced"}, {"folds": FoldsConfig(count=2, by="class")}, {}])
@pytest.mark.parametrize("targets", [[0, 1] * 20, [0] * 7])
def test_other_numbers_of_labels_than_of_samples_are_refused(settings, targets):
    def source(data, labels=None):
        methods = {"datasets": lambda source, config: (data, data)}
        if labels is not None:
            methods["labels"] = lambda source: labels
        made = type("Made", (DatasetSource,), methods)
        return made(LabelsConfig(**settings), Context(torch.device("cpu"), Slots(), 3, batch_size=4)).class_counts()

    message = rf"Wrapped\.targets has {len(targets)} labels for 30 samples"
    with pytest.raises(UsageError, match=message):
        source(Wrapped(30, targets))
    with pytest.raises(UsageError, match=message):
        source(Subset(Wrapped(30, targets), range(12)))
    if "folds" not in settings:
        with pytest.raises(UsageError, match=rf"Made\.labels has {len(targets)} labels for 30 samples"):
            source(Wrapped(30, None), torch.tensor(targets))
    assert source(Wrapped(30, [0, 0, 1] * 10)) is not None


def stepped(pipeline, updates):
    step = Step(pipeline)
    while pipeline.progress.updates < updates:
        step()
    return pipeline


def test_every_classifier_that_ships_has_class_weights():
    registry = Registry()
    kinds = {kind for kind in registry.kinds("model") if issubclass(registry.get("model", kind), ClassWeightsConfig)}
    assert kinds == {"classifier", "conv_classifier", "mlp", "gcn", "partitioned_gnn"}


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_change_the_loss_of_the_training_and_not_that_of_the_evaluation(name):
    sets = WEIGHTED[name]
    plain, weighted = (assemble(tiny(name, *sets, *more)) for more in ((), ("model.class_weights=balanced",)))
    assert evaluated(plain) == evaluated(weighted)
    learner, source = weighted.learner, weighted.source
    assert len(learner.context.class_weights) == source.sizes["classes"]
    batch = source.draw(weighted.batch_size, Progress("updates", 1))
    weights = learner.context.class_weights
    learner.module.train()
    loss = learner.loss(batch, {}, Progress("updates", 1))
    mask = batch.get("mask", torch.ones_like(batch["label"], dtype=torch.bool))
    logits, label = learner.predict(learner.inputs(batch))[mask], batch["label"][mask]
    expected = cross_entropy(logits, label, weights)
    assert float(loss.sum.detach() / loss.count) == pytest.approx(float(expected), rel=1e-5)


def test_a_list_of_weights_is_used_as_it_is():
    weights = [1.0 + number for number in range(10)]
    pipeline = assemble(tiny("digits_classifier", f"model.class_weights={weights}"))
    assert pipeline.learner.context.class_weights.tolist() == weights


@pytest.mark.parametrize(
    ("name", "assignment", "message"),
    [
        ("digits_classifier", "model.class_weights=[1, 2]", "has 2 weights, and the data have 10 classes"),
        ("digits_classifier", "model.class_weights=even", "should be balanced or a list of positive numbers"),
        ("digits_classifier", "model.class_weights=[1, -2]", "should be balanced or a list of positive numbers"),
        ("digits_classifier", "data.sampling=even", "data.sampling: should be 'random' or 'balanced'"),
        ("gcn_cora", "data.sampling=balanced", "'citation_graph' has no labels of its training samples"),
        ("shakespeare_gpt", "data.sampling=balanced", "'text' has no labels of its training samples"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_with_its_place(name, assignment, message):
    with pytest.raises(RecipeError) as refused:
        assemble(tiny(name, assignment))
    # The line of the recipe follows the message.
    line = str(refused.value).splitlines()[0]
    assert message in line
    assert assignment.partition("=")[0] in line
    assert "--set" in line or ":" in line


def test_balanced_samples_are_the_same_after_a_resumption():
    recipe = tiny("digits_classifier", "data.sampling=balanced", "model.class_weights=balanced")
    per_epoch = assemble(recipe).source.epoch_samples(recipe.train.batch_size) // recipe.train.batch_size
    pipeline = stepped(assemble(recipe), per_epoch - 1)
    state = kept(pipeline.state_dict())
    resumed = assemble(recipe, resumed=state)
    resumed.load_state_dict(state)
    for _ in range(3):  # into the second epoch
        first, second = (trained.source.draw(64, trained.progress) for trained in (pipeline, resumed))
        assert torch.equal(first["image"], second["image"])


def test_defaults_leave_the_digest_of_a_recipe_as_it_was():
    plain = tiny("digits_classifier")
    assert not {"class_weights", "sampling"} & set(itertools.chain(plain.values()["model"], plain.values()["data"]))
    digests = {tiny("digits_classifier", *sets).digest for sets in (
        (), ("data.sampling=random",), ("data.sampling=balanced",), ("model.class_weights=balanced",)
    )}  # fmt: skip
    assert len(digests) == 3


def test_a_share_of_the_data_is_balanced_by_its_own_classes():
    recipe = tiny("digits_classifier", "data.sampling=balanced", "data.limit.train=0.3")
    source = assemble(recipe).source
    assert torch.equal(source.labels(), source._balanced_labels)
    assert sum(source.class_counts()) == len(source.train)
