"""Names of metrics that plugins choose: reserved ones are refused, whoever returns them."""

import pytest
import torch
from toy_runs import toy_pipeline, trained

from runner.api import Loss, Mean, RunnerError


def in_loss(pipeline, name):
    def wrapper(step):
        return lambda *arguments: step(*arguments)._replace(also={name: Mean(torch.tensor(123.0), 1)})

    pipeline.slots.wrap("loss", wrapper)


def in_update(pipeline, name):
    pipeline.slots.wrap("update", lambda step: lambda *arguments: {**step(*arguments), name: torch.tensor(123.0)})


def in_statistics(pipeline, name):
    pipeline.source.statistics = lambda: {name: 123.0}


def in_evaluation(pipeline, name):
    evaluate = pipeline.source.evaluate
    pipeline.source.rehearse = lambda learner, batch: None
    pipeline.source.evaluate = lambda learner: {**evaluate(learner), name: 123.0}


REFUSED = [
    (in_loss, "loss", r"Loss\.also: 'loss' is the name of the loss itself"),
    (in_loss, "updates", r"Toy\.update returned a metric with the name 'updates', which is reserved for the runner"),
    (in_loss, "", r"Toy\.update returned a metric with the name ''; use a string"),
    (in_update, "updates", r"Toy\.update returned a metric with the name 'updates'"),
    (in_update, " ", r"Toy\.update returned a metric with the name ' '"),
    (in_update, 3, r"Toy\.update returned a metric with the name 3; use a string"),
    (in_statistics, "loss", r"Words\.statistics returned a metric with the name 'loss', which is one of Toy\.update"),
    (
        in_statistics,
        "updates",
        r"Words\.statistics returned a metric with the name 'updates', which is reserved for the runner",
    ),
    (in_statistics, "", r"Words\.statistics returned a metric with the name ''"),
    (in_evaluation, "", r"Words\.evaluate returned a metric with the name ''"),
    (in_evaluation, None, r"Words\.evaluate returned a metric with the name None"),
]


@pytest.mark.parametrize(("where", "name", "message"), REFUSED)
def test_a_reserved_name_is_refused(where, name, message, tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=4", "train.log_every=2")
    where(pipeline, name)
    with pytest.raises(RunnerError, match=message):
        trained(tmp_path, pipeline)


@pytest.mark.parametrize("name", ["Loss", "samples", "step", "epoch", "a/b"])
@pytest.mark.parametrize("where", [in_loss, in_update, in_statistics])
def test_other_names_are_logged_beside_the_loss(where, name, tmp_path):
    plain, pipeline = (toy_pipeline(tmp_path, "train.updates=4", "train.log_every=2") for _ in range(2))
    where(pipeline, name)
    notes = [trained(tmp_path / str(number), each)[1].points for number, each in enumerate((plain, pipeline))]
    for metric in ("train/loss", "eval/loss", "train/updates"):
        assert notes[0][metric] == notes[1][metric]
    assert [value for _, value in notes[1][f"train/{name}"]] == [123.0, 123.0]


def test_parts_of_a_batch_may_not_log_the_name_either():
    part = Loss(torch.tensor(1.0), 1, {"loss": Mean(5.0, 1)})
    with pytest.raises(RunnerError, match="'loss' is the name of the loss itself"):
        Loss.total([part, part]).means()


def test_a_metric_of_the_learner_that_the_source_measures_itself_is_refused(tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=4")
    joined = pipeline.source.with_own_metrics(pipeline.learner, {"loss": 1.0}, {"accuracy": 0.5})
    assert joined == {"loss": 1.0, "accuracy": 0.5}
    with pytest.raises(RunnerError, match=r"Toy\.metrics returned .* 'accuracy', which is a metric of Words"):
        pipeline.source.with_own_metrics(pipeline.learner, {"accuracy": 1.0}, {"accuracy": 0.5})
