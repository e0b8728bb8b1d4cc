"""A student comes closer to its teacher, once."""

import re
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learnt import attached, inputs, learnt
from running import RECIPES
from trained_classifiers import classifier

from runner.api import UsageError
from runner.plugin.registry import Registry
from runner.plugins.inference import lessons
from runner.plugins.inference.distil import DistilConfig
from runner.plugins.inference.network import parameters
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.system.tensor_trees import tensors
from runner.verify.inference_gate import verify_inference


def student(name, updates):
    """The pipeline, and by how many per cent of their size the network's answers are off."""
    pipeline = learnt(name)
    attached(pipeline, DistilConfig(layers=1, updates=updates, lr=3e-3))
    (note,) = pipeline.reports["distil"].notes
    assert note.startswith("1 of 2 layers: ")
    return pipeline, float(re.search(r"off by ([\d.]+)%", note)[1])


@pytest.mark.parametrize("name", ["shakespeare_gpt", "grasp_diffusion"])
def test_it_learns_to_answer_like_the_teacher(name):
    (pipeline, first), (_, last) = student(name, 1), student(name, 60)
    assert last < 0.8 * first
    assert len(pipeline.learner.blocks()) == 1
    assert pipeline.learner.averages is None
    assert not pipeline.learner.module.training
    (asked,) = inputs(pipeline, 4)
    assert all(tensor.isfinite().all() for tensor in tensors(pipeline.learner.predict(asked)))


def test_it_begins_with_layers_of_the_teacher():
    pipeline = learnt("shakespeare_gpt", "model.layers=4")
    theirs = [block.qkv.weight.clone() for block in pipeline.learner.blocks()]
    before = parameters(pipeline.learner.module)
    attached(pipeline, DistilConfig(layers=3, updates=1, lr=1e-30))
    assert [
        next(place for place, other in enumerate(theirs) if torch.equal(block.qkv.weight, other))
        for block in pipeline.learner.blocks()
    ] == [0, 2, 3]
    assert parameters(pipeline.learner.module) == before - 12 * 16 * 16 - 4 * 16


def test_nobody_trains_a_student_twice(tmp_path, monkeypatch):
    weights = []
    for trainings in (1, 0):
        pipeline = learnt("shakespeare_gpt")
        pipeline.folder = tmp_path
        if not trainings:
            monkeypatch.setattr(torch.optim, "AdamW", lambda *_, **__: pytest.fail("it was trained twice"))
            pipeline.learner.configure_optimizers = lambda: None
        attached(pipeline, DistilConfig(layers=1, updates=3))
        weights.append(list(pipeline.learner.module.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@pytest.mark.parametrize(
    ("name", "layers", "said"),
    [
        ("digits_classifier", 1, "layers: learner 'classifier' has no setting of that name"),
        ("shakespeare_gpt", 2, "layers: 2 should be fewer than the 2"),
        ("marl_baseline", 1, "layers: learner 'masac' has no setting"),
    ],
)
def test_what_cannot_be_distilled_is_refused(name, layers, said):
    with pytest.raises(UsageError, match=said):
        attached(learnt(name, updates=0), DistilConfig(layers=layers))


WIDE = ("model.widths=[16]", "model.shift=0")
SMALLER = {"widths": [8]}


def student_of(name, *sets, **settings):
    """The weights of a student, and its stage's note."""
    pipeline = learnt(name, *sets)
    attached(pipeline, DistilConfig(**settings))
    (note,) = pipeline.reports["distil"].notes
    return pipeline.learner.module.state_dict(), note


@pytest.mark.parametrize("loss", [{}, {"temperature": 3.0, "labels": 0.3}])
def test_the_same_seed_makes_the_same_student(loss):
    settings = {"student": SMALLER, "updates": 2, **loss}
    first, _ = student_of("digits_classifier", *WIDE, **settings)
    second, _ = student_of("digits_classifier", *WIDE, **settings)
    other, _ = student_of("digits_classifier", *WIDE, "seed=1", **settings)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "sets", "student"),
    [
        ("digits_classifier", WIDE, SMALLER),
        ("mlp", ("model.widths=[16]",), SMALLER),
        ("shakespeare_gpt", (), {"layers": 1, "width": 8}),
        ("gcn_cora", (), {"width": 2}),
    ],
)
def test_a_student_comes_closer_to_softened_probabilities(name, sets, student):
    divergences = []
    for updates in (1, 40):
        pipeline = learnt(name, *sets)
        teacher = deepcopy(pipeline.learner.module)
        attached(pipeline, DistilConfig(student=student, temperature=3.0, labels=0.3, updates=updates, lr=1e-2))
        assert parameters(pipeline.learner.module) < parameters(teacher)
        assert pipeline.learner.config.model_dump() == {**pipeline.recipe.model.model_dump(), **student}
        with torch.no_grad():
            lesson = next(lessons.lessons(pipeline.learner, teacher, pipeline))
            divergences.append(float(lessons.softened_loss(pipeline.learner, lesson, 3.0, 0.3)))
    assert divergences[1] < divergences[0]


def expected_loss(pipeline, lesson, temperature, labels):
    """The formula of the paper, written out in float64 for the batch's labels."""
    batch = lesson.batch
    targets = batch["label"] if "label" in batch else batch["tokens"][:, 1:]
    (call,) = lesson.calls
    with torch.no_grad():
        student = pipeline.learner.module(*call.inputs).double().flatten(0, -2)
    teacher = call.output.double().flatten(0, -2)
    ours, theirs = (torch.exp(logits / temperature) for logits in (student, teacher))
    ours, theirs = ours / ours.sum(-1, keepdim=True), theirs / theirs.sum(-1, keepdim=True)
    soft = temperature**2 * (theirs * (theirs / ours).log()).sum(-1).mean()
    hard = -(student.exp() / student.exp().sum(-1, keepdim=True)).log()[range(len(student)), targets.flatten()].mean()
    return float((1 - labels) * soft + labels * hard)


@pytest.fixture(scope="module", params=["digits_classifier", "shakespeare_gpt"])
def taught(request):
    """A pipeline whose network differs from its teacher, and a lesson."""
    pipeline = learnt(request.param, updates=20)
    teacher = deepcopy(pipeline.learner.module)
    with torch.no_grad():
        for number, weight in enumerate(pipeline.learner.module.parameters()):
            generator = torch.Generator().manual_seed(number)
            weight += 0.2 * torch.randn(weight.shape, generator=generator)
        return pipeline, next(lessons.lessons(pipeline.learner, teacher, pipeline))


def agrees(taught, temperature, labels):
    pipeline, lesson = taught
    with torch.no_grad():
        loss = lessons.softened_loss(pipeline.learner, lesson, temperature, labels)
    return float(loss) == pytest.approx(expected_loss(pipeline, lesson, temperature, labels), rel=1e-4, abs=1e-6)


@given(temperature=st.floats(0.5, 20), labels=st.floats(0, 1))
def test_the_loss_is_that_of_the_paper(taught, temperature, labels):
    assert agrees(taught, temperature, labels)


def divided(student, teacher, temperature):
    return RIGHT(student, teacher, temperature) / temperature**2


def one_temperature(student, teacher, temperature):
    return RIGHT(student, teacher * temperature, temperature)


def reversed_divergence(student, teacher, temperature):
    return RIGHT(teacher, student, temperature)


def mean_over_entries(student, teacher, temperature):
    return RIGHT(student, teacher, temperature) / student.shape[-1]


RIGHT = lessons.softened_divergence
LOSS = lessons.softened_loss


def of_another_sample(learner, lesson, temperature, labels):
    keys = {"label", "tokens"} & lesson.batch.keys()
    rolled = {key: lesson.batch[key].roll(1, 0) for key in keys}
    return LOSS(learner, lesson._replace(batch={**lesson.batch, **rolled}), temperature, labels)


def weights_swapped(learner, lesson, temperature, labels):
    return LOSS(learner, lesson, temperature, 1 - labels)


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("softened_divergence", divided),
        ("softened_divergence", one_temperature),
        ("softened_divergence", reversed_divergence),
        ("softened_divergence", mean_over_entries),
        ("softened_loss", of_another_sample),
        ("softened_loss", weights_swapped),
    ],
)
def test_wrong_losses_are_noticed(taught, monkeypatch, function, wrong):
    assert agrees(taught, 3.0, 0.3)
    monkeypatch.setattr(lessons, function, wrong)
    assert not agrees(taught, 3.0, 0.3)


def test_labels_of_another_sample_fail_the_gate(tmp_path, monkeypatch):
    monkeypatch.setattr(lessons, "softened_loss", of_another_sample)
    trained = classifier(tmp_path, *WIDE)
    stage = DistilConfig(student=SMALLER, temperature=1.0, labels=1.0, updates=30, lr=1e-2)
    recipe = replace(trained.recipe, inference={"distil": stage})
    report = verify_inference(replace(trained, recipe=recipe), (), lambda _: None)
    assert {row.verdict for row in report.rows} == {"FAIL"}


@pytest.mark.parametrize(
    ("name", "outside"),
    [
        ("grasp_diffusion", {"encoder", "no_cloud"}),
        ("grasp_latent", {"encoder", "no_cloud", "grasp_encoder", "grasp_decoder"}),
        ("grasp_cvae", {"encoder"}),
    ],
)
def test_a_new_student_takes_over_what_its_lessons_do_not_train(name, outside):
    pipeline = learnt(name, "model.layers=2")
    teacher = dict(deepcopy(pipeline.learner.module).named_parameters())
    attached(pipeline, DistilConfig(student={"layers": 1}, updates=2))
    pairs = [(part, weight, teacher[part]) for part, weight in pipeline.learner.module.named_parameters()]
    same = {part.partition(".")[0] for part, weight, other in pairs if torch.equal(weight, other)}
    changed = {part.partition(".")[0] for part, weight, other in pairs if not torch.equal(weight, other)}
    assert outside <= same
    assert not outside & changed


LARGER = r"student: [\d,]+ parameters should be fewer than the "


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gps_esol", {"temperature": 3.0}, "temperature: learner 'gps' has no logits of classes; remove it"),
        ("grasp_diffusion", {"temperature": 1.0, "labels": 1.0}, "temperature: learner 'grasp_diffusion' has no"),
        (
            "digits_classifier",
            {"student": {"widths": [8, 16]}},
            LARGER,
        ),
        ("digits_classifier", {"student": {"widths": [8]}}, LARGER),
        ("digits_classifier", {"student": {"layers": 1}}, r"student\.layers: learner 'classifier' has no setting"),
        ("digits_classifier", {"student": {"widths": [7]}}, r"student\.widths\.0: input should be"),
        ("shakespeare_gpt", {"student": {"heads": 3}}, r"student\.heads: should divide the width"),
        ("grasp_latent", {"student": {"latent": 4}}, r"student: 'grasp_decoder\.0\.weight' is not trained by outputs"),
    ],
)
def test_students_that_cannot_be_are_refused(name, settings, message):
    with pytest.raises(UsageError, match=message) as refusal:
        attached(learnt(name, updates=0), DistilConfig(**settings))
    assert "\n" not in str(refusal.value).strip()


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ("{temperature: 0.0}", "temperature", "greater than 0"),
        ("{temperature: -1.5}", "temperature", "greater than 0"),
        ("{temperature: 3.0, labels: 1.5}", "labels", "less than or equal to 1"),
        ("{temperature: 3.0, labels: -0.1}", "labels", "greater than or equal to 0"),
        ("{labels: 0.3}", "labels", "needs temperature"),
        ("{layers: 1, student: {layers: 1}}", "student", "either layers or student"),
    ],
)
def test_settings_out_of_range_are_errors_with_file_and_line(tmp_path, settings, key, message):
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: {RECIPES}/shakespeare_gpt.yaml\nname: mine\ninference:\n  distil: {settings}\n")
    with pytest.raises(RecipeError, match=message) as refusal:
        load(path, (), Registry())
    assert f"{path}:4:" in str(refusal.value)
    assert f"inference.distil.{key}" in str(refusal.value)
