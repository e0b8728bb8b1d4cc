"""``runner.training`` and ``runner.load_model``: as thin as the command line, and at home in a notebook."""

import ast
import copy
import json
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import mlflow
import pytest
import torch
from interrupted import flat

import runner
from runner.plugin.averages import AVERAGES
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system import generators, torch_settings
from runner.tracking import RunFolder
from runner.training import checkpoint as reader
from runner.training.evaluate import evaluate

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
GAN = Path(__file__).parents[1] / "docs" / "example_gan.py"
TINY = {
    "model.widths": [8],
    "train.epochs": 2,
    "train.evaluate_every": 1,
    "train.checkpoint_every": 1,
    "tracking.system_metrics": False,
    "device": "cpu",
}

pytestmark = pytest.mark.usefixtures("migrated_workspace")


def small(**settings):
    return runner.train("digits_classifier", set={**TINY, **settings})


def test_importing_the_runner_imports_nothing_else():
    heavy = "{name for name in sys.modules if name.partition('.')[0] in ('torch', 'mlflow', 'pydantic', 'numpy')}"
    code = f"import sys, runner; assert runner.RunnerError and not {heavy}; assert callable(runner.train)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_not_there_is_said():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        runner.trian  # noqa: B018


def test_a_training_returns_what_came_of_it_and_a_model_comes_back():
    result = small()
    assert result.status == "FINISHED"
    assert Path(result.run_dir, "recipe.lock.yaml").exists()
    state = reader.load(reader.checkpoints(Path(result.run_dir, "checkpoints"))[-1])
    for reference in (result, result.run_dir, result.run_name, result.run_id, "latest"):
        learner = runner.load_model(reference, "last")
        for name, tensor in state["pipeline"]["learner"]["modules"]["model"].items():
            assert torch.equal(tensor, learner.modules()["model"].state_dict()[name])


def test_the_best_checkpoint_is_the_one_that_is_loaded():
    result = small(**{"optimizer.lr": 0.003})
    found = reader.checkpoints(Path(result.run_dir, "checkpoints"))
    scores = [reader.read_manifest(path)["score"] for path in found]
    best = max(range(len(found)), key=lambda index: (scores[index], index))
    expected = reader.load(found[best])["pipeline"]["learner"]["modules"]["model"]
    loaded = runner.load_model(result).modules()["model"].state_dict()
    assert all(torch.equal(expected[name], loaded[name]) for name in expected)


def test_mlflow_keeps_the_best_model_with_the_data_it_learnt_from():
    result = small(**{"train.epochs": 3, "optimizer.lr": 0.003})
    client = mlflow.MlflowClient(result.tracking_uri)
    run = client.get_run(result.run_id)
    (logged,) = run.outputs.model_outputs
    learner, best = runner.load_model(f"models:/{logged.model_id}"), runner.load_model(result)
    for name, tensor in best.modules()["model"].state_dict().items():
        assert torch.equal(tensor, learner.modules()["model"].state_dict()[name])
    assert not any(part.training for part in learner.module.modules())
    (kept,) = reader.checkpoints(Path(result.run_dir, "model", "checkpoints"))
    assert reader.load(kept)["pipeline"]["learner"].keys() == {"modules", "frozen_parameters"}
    (given,) = run.inputs.dataset_inputs
    assert given.dataset.name == "digits"
    assert json.loads(given.dataset.profile)["held_out"] == int(run.data.params["data.held_out"])
    with pytest.raises(runner.RunnerError, match="cannot open models:/m-nothing"):
        runner.load_model("models:/m-nothing")


def test_a_model_is_in_evaluation_mode_with_the_averaged_parameters():
    result = small(**{"train.ema": 0.5, "optimization.fused_optimizer": True})
    learner = runner.load_model(result, "last")
    state = reader.load(reader.checkpoints(Path(result.run_dir, "checkpoints"))[-1])["pipeline"]["learner"]
    module = learner.module
    averages = state[AVERAGES]
    assert not any(part.training for part in module.modules())
    assert len(averages) == len([*module.parameters()])
    for name, parameter in module.named_parameters():
        assert torch.equal(averages[f"model.{name}"], parameter)
    with torch.no_grad():
        assert learner.predict(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert not any(part.training for part in module.modules())


def test_a_damaged_checkpoint_is_passed_over_and_left_where_it_is():
    result = small()
    newest = reader.checkpoints(Path(result.run_dir, "checkpoints"))[-1]
    (newest / "state.json").write_text("{}")
    assert runner.load_model(result, "last")
    for path in reader.checkpoints(newest.parent):
        (path / "state.json").write_text("{}")
    with pytest.raises(runner.RunnerError, match="has no checkpoint that can be used"):
        runner.load_model(result)
    assert newest.exists()


def test_plugins_of_a_file_are_named_as_on_the_command_line():
    settings = {
        "train.updates": 8,
        "train.evaluate_every": None,
        "train.log_every": 4,
        "tracking.system_metrics": False,
    }
    result = runner.train(GAN.with_suffix(".yaml"), settings, plugins=[GAN])
    assert result.resume.startswith(f"runner resume {result.run_name} --plugin ")
    for plugins in ([GAN], []):  # which are found again where they were
        assert runner.load_model(result, plugins=plugins).predict(torch.zeros(1, 16)).shape == (1, 64)
    (logged,) = mlflow.MlflowClient(result.tracking_uri).get_run(result.run_id).outputs.model_outputs
    model = f"models:/{logged.model_id}"
    named = f"{model} was trained with the plugin file {GAN.name}, which does not run unless you name it"
    with pytest.raises(runner.RunnerError, match=re.escape(named)):
        runner.load_model(model)
    assert runner.load_model(model, plugins=[GAN])


def test_mistakes_are_errors_and_never_the_end_of_the_process():
    with pytest.raises(runner.RunnerError, match="did you mean 'epochs'"):
        runner.train("digits_classifier", set={"train.epoch": 2})
    with pytest.raises(runner.RunnerError, match="no such file"):
        runner.train("no_such_recipe")
    for function in (runner.load_model, runner.resume):
        with pytest.raises(runner.RunnerError, match="no runs yet"):
            function()


def test_a_finished_run_is_not_resumed():
    result = small()
    with pytest.raises(runner.RunnerError, match=f"it is finished; model.init_from={result.run_name} starts"):
        runner.resume(result)


def test_signal_handlers_stay_as_they_are_and_another_thread_may_train():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    results = []
    thread = threading.Thread(target=lambda: results.append(small()))
    thread.start()
    thread.join()
    assert results[0].status == "FINISHED"
    assert small().metrics["train/loss"] == results[0].metrics["train/loss"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_learner_is_not_copied_because_the_copy_would_have_the_networks_of_the_original():
    learner = runner.load_model(small())
    with pytest.raises(TypeError, match=r"a learner \(Classifier\) cannot be copied.* copy modules\(\)"):
        copy.deepcopy(learner)
    assert copy.deepcopy(learner.modules())["model"] is not learner.modules()["model"]


CONTEXTS = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "device": partial(torch.device, "meta"),
    "none": nullcontext,
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_of_the_caller_has_no_effect(name):
    reference = small()
    with CONTEXTS[name]():
        result = small()
        learner = runner.load_model(result, "last")
    assert result.metrics["eval/loss"] == reference.metrics["eval/loss"]
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(learner.predict(images), runner.load_model(reference, "last").predict(images))
    learner.predict(images.requires_grad_()).sum()
    assert not any(parameter.is_inference() for parameter in learner.modules()["model"].parameters())


def test_a_program_that_trains_keeps_its_random_numbers_and_settings():
    before = torch_settings.read(), flat(generators.state_dict())
    result = small(**{"system.deterministic": True})
    assert (torch_settings.read(), flat(generators.state_dict())) == before
    folder = RunFolder(Path(result.run_dir))
    registry = Registry()
    evaluate(load(folder.path / "recipe.lock.yaml", [], registry), registry, folder)
    assert (torch_settings.read(), flat(generators.state_dict())) == before


@pytest.mark.parametrize(
    ("change", "restore", "words"),
    [
        (
            partial(torch.set_float32_matmul_precision, "medium"),
            partial(torch.set_float32_matmul_precision, "highest"),
            "torch.get_float32_matmul_precision is medium instead of highest",
        ),
        (
            partial(torch.set_flush_denormal, True),
            partial(torch.set_flush_denormal, False),
            "torch.set_flush_denormal is True instead of False",
        ),
        (lambda: None, lambda: None, None),
    ],
)
def test_a_setting_of_torch_that_the_recipe_does_not_have_is_reported(caplog, change, restore, words):
    change()
    try:
        small()
    finally:
        restore()
    reports = [record.getMessage() for record in caplog.records if "not by the recipe" in record.getMessage()]
    assert [report.partition(":")[0] for report in reports] == ([words] if words else [])


def test_the_page_runs_from_its_first_line_to_its_last(capsys):
    # The cells of a notebook run in test_notebooks.py, in a module of their own.
    page = re.sub(r"^## In a notebook\n.*?(?=^## )", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names = {}
    for block in blocks:
        for node in ast.parse(block).body:
            exec(compile(ast.Module([node], []), str(PAGE), "exec"), names)
    status, run_id, labels, error = capsys.readouterr().out.split("\n", 3)
    assert status.startswith("FINISHED 0.")
    assert names["result"].run_id in run_id
    assert labels.startswith("tensor([")
    assert "did you mean 'epochs'?" in error


def test_what_would_share_the_generators_of_a_training_in_another_thread_is_refused():
    result = small()
    with generators.exclusive("a training"):
        with ThreadPoolExecutor(1) as other:
            for begin in (small, partial(runner.load_model, result), partial(evaluated_again, result)):
                with pytest.raises(runner.RunnerError, match=r"cannot start while a training runs in this process: "):
                    other.submit(begin).result()
        with pytest.raises(runner.RunnerError, match="share its random generators; use a process for each"):
            small()
        learner = runner.load_model(result)  # a teacher that a learner builds, for example
    assert small().metrics["eval/accuracy"] == result.metrics["eval/accuracy"]
    assert not learner.modules()["model"].training


def evaluated_again(result):
    registry = Registry()
    return evaluate(load(result.lock, (), registry), registry, RunFolder(Path(result.run_dir)))
