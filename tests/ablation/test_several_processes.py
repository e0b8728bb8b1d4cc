"""Ablations of trainings on several processes."""

import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from running import TINY_UAV

from runner.ablation.ablate import ablate
from runner.ablation.experiment import load_experiment
from runner.ablation.report import show
from runner.child.spawn import Child
from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.system.console import Console
from runner.system.errors import ExitCode, UsageError
from runner.tracking import Workspace
from runner.tracking.store import Store
from runner.verify.group_gate import GroupGate
from runner.verify.variants import variants_of

TINY_DIGITS = (
    *("device=cpu", "model.widths=[8]", "data.scale=1"),
    *("optimization.fused_optimizer=off", "optimization.heap_retention=off"),
)
TINY_TEXT = (
    *("device=cpu", "data.synthetic=true", "data.context=16", "train.batch_size=8"),
    *("model.layers=1", "model.width=16", "model.heads=2"),
    *("optimization.compile=off", "optimization.fused_optimizer=off", "optimization.heap_retention=off"),
    "optimization.amp=off",
)
FAILS_IN_THE_SECOND = """
from runner.api import Exact, Stage, StageConfig

class FailsConfig(StageConfig):
    kind = 'fails'
    phase = 3
    wraps = frozenset({'update'})
    implementation = 'Fails'

    def contract(self, setting):
        return Exact()

class Fails(Stage):
    def attach(self, pipeline):
        if pipeline.learner.context.processes.rank == 1:
            raise ValueError('the second process has no luck')
"""


class Silent:
    """A reporter that shows nothing."""

    def __init__(self):
        self.started = time.monotonic()

    def say(self, text):
        pass

    def phase(self, name):
        return nullcontext()


@pytest.fixture(autouse=True)
def quick_children(copied_children, migrated_workspace, monkeypatch):
    """They have imported everything, and measure for moments."""

    def quick(module, *arguments, **options):
        quick_modules = {"variant_process": "quick_variant_process", "roofline": "quick_roofline"}
        name = quick_modules.get(module.rpartition(".")[2], module)
        return Child(name, *arguments, **options)

    for module in ("runner.ablation.measurement_rounds", "runner.child.group"):
        monkeypatch.setattr(f"{module}.Child", quick)


@pytest.fixture
def measured(tmp_path):
    """Measures a recipe on two processes, in as few rounds as possible."""

    def measured(recipe, *sets, plugins=(), gate=None, **changes):
        registry = Registry(list(plugins))
        settings = {"kind": "ablation", "name": "several", "recipe": recipe, "set": list(sets), "processes": 2,
                    "variants": ["all"], "budget": 6000, "rounds": {"least": 3, "most": 3}}  # fmt: skip
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(settings | changes))
        experiment = load_experiment(path, (), registry)
        return ablate(experiment, registry, Workspace(), None, False, "runner ablate", gate, Silent())

    return measured


def test_every_stage_is_measured_with_its_bytes(measured, tmp_path, capsys):
    """One rounds gradients, one skips updates, and one fails in the second process."""
    plugin = tmp_path / "fails.py"
    plugin.write_text(FAILS_IN_THE_SECOND)
    stages = ("compressed_gradients.format=fp16", "skips_every_second={after: 4}", "fails=on")
    sets = (*TINY_DIGITS, *(f"optimization.{stage}" for stage in stages))
    plugins = [plugin, Path(__file__).parent / "fakes.py"]
    done = measured("digits_classifier", *sets, plugins=plugins, gate=GroupGate(2), variants=["alone"])
    (case,) = done.cases
    assert case.processes == 2
    names = ("baseline", "one process", "compressed_gradients", "skips_every_second")
    assert {variant.name for variant in case.variants} == set(names)
    baseline, single, compressed, fake = map(case.named, names)
    # Sums of 16 bits, and as many other numbers as before.
    saved = baseline.traffic.computed - compressed.traffic.computed
    assert 0.4 * baseline.traffic.computed < saved < 0.5 * baseline.traffic.computed
    assert baseline.traffic.counted >= baseline.traffic.computed
    assert baseline.traffic.unknown == ()
    assert compressed.verdict == "INCONCLUSIVE"
    assert "only trainings could tell" in compressed.verdict_summary
    # Each process of two has a part of the batch.
    assert single.traffic is None
    assert single.compared
    assert not single.caught
    assert "did not change in" in fake.caught
    assert "the second process has no luck" in case.missing["fails"]
    assert done.exit_code is ExitCode.GATE_FAILED
    check_reports(done, compressed, capsys)


def check_reports(done, compressed, capsys):
    """Terminals, page, JSON and MLflow have the bytes."""
    for width in (80, 160):
        show(done, Console(width=width))
        printed = capsys.readouterr().out
        assert "of 2 processes" in printed
        assert ("computed" in printed) is (width == 160)
    report = (Path(done.folder) / "README.md").read_text()
    assert "| KiB sent | computed |" in report
    assert "| one process | none |" in report
    stored = json.loads((Path(done.folder) / "result.json").read_text())
    (found,) = [entry for entry in stored["variants"] if entry["name"] == compressed.name]
    assert found["traffic"]["computed"] == compressed.traffic.computed
    runs = Store(Workspace()).client.search_runs(
        ["1"], f"tags.`mlflow.parentRunId` = '{done.run_id}' and tags.stages = 'compressed_gradients'"
    )
    assert runs[0].data.metrics["computed_bytes"] == compressed.traffic.computed


def test_a_divided_model_is_proven(measured):
    done = measured("shakespeare_gpt", *TINY_TEXT, "model.dropout=0", "optimization.fsdp=on", gate=GroupGate(2))
    (case,) = done.cases
    divided = case.named("all")
    assert (divided.verdict, divided.caught) == ("PASS", ""), divided.verdict_summary
    assert divided.compared
    # Collects parameters twice, and returns no sums.
    assert 1.3 < divided.traffic.computed / case.named("baseline").traffic.computed < 1.6
    assert done.exit_code in (ExitCode.DONE, ExitCode.INCONCLUSIVE)


def test_simulators_are_measured_beside_one_process_without_any_stage(measured):
    off = [f"optimization.{kind}=off" for kind in ("forward_cache", "merged_critic_loss")]
    done = measured("marl_phase1", *TINY_UAV, *off, "data.envs=2")
    (case,) = done.cases
    assert [variant.title for variant in case.variants] == ["baseline", "one process"]
    assert "several processes draw samples" in case.named("one process").not_compared
    assert case.named("one process").ratio.value > 0
    assert case.named("baseline").traffic.computed > 0
    assert done.exit_code is ExitCode.DONE


def test_a_stage_for_one_process_is_inactive():
    sets = [each for each in TINY_TEXT if not each.startswith("optimization.compile")]
    recipe = load("shakespeare_gpt", [*sets, "model.dropout=0.1", "optimization.compile=on"], Registry())
    variants = variants_of(recipe, torch.device("cpu"), processes=2)
    assert variants.inactive.keys() == {"compile"}
    assert "not with several processes" in variants.inactive["compile"]
    assert [variant.name for variant in variants.variants] == ["baseline", "one process"]


def test_what_several_processes_cannot_train_is_refused_at_once(tmp_path):
    with pytest.raises(UsageError, match="sentinel"):
        load_experiment("digits_classifier", ["train.sentinel=on"], Registry(), processes=2)
    with pytest.raises(RecipeError, match="no stage is switched on"):
        load_experiment("digits_classifier", TINY_DIGITS, Registry(), processes=1)


def test_another_number_of_processes_is_another_ablation():
    digests = {
        load_experiment("digits_classifier", (), Registry(), processes=processes).digest for processes in (1, 2, 4)
    }
    assert len(digests) == 3
    assert load_experiment("digits_classifier", (), Registry()).digest in digests
