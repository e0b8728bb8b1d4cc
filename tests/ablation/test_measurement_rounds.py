import json
import math
import random
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import yaml
from running import TINY_UAV

from runner.ablation.ablate import RESULT, ablate
from runner.ablation.case_log import CaseLog
from runner.ablation.experiment import load_experiment
from runner.ablation.measurement_log import ROUNDS, MeasurementLog
from runner.ablation.measurement_rounds import LIMIT_SECONDS, Measurement
from runner.ablation.time_forecast import order
from runner.child.spawn import Cause, Child, ChildError
from runner.plugin.registry import Registry
from runner.plugins.stages.amp import AmpConfig
from runner.proof.verdict import Outcome, Verdict
from runner.recipe.loader import load
from runner.system.errors import ExitCode, RunnerError, UsageError
from runner.tracking import Workspace
from runner.tracking.store import Store
from runner.training.signals import Stop

STAGES = ("forward_cache", "merged_critic_loss")


@pytest.fixture
def experiment(tmp_path):
    def experiment(*sets, **changes):
        settings = {"kind": "ablation", "name": "small", "recipe": "marl_phase1", "set": [*TINY_UAV, *sets],
                    "variants": ["all"], "budget": 600, "rounds": {"least": 3, "most": 3}}  # fmt: skip
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(settings | changes))
        return load_experiment(path, (), Registry())

    return experiment


@pytest.fixture
def quick_children(copied_children, monkeypatch):
    """They have imported everything, and measure for moments."""
    for module in ("runner.ablation.measurement_rounds", "runner.child.group"):
        monkeypatch.setattr(f"{module}.Child", quick_child)


def quick_child(module, *arguments, **options):
    return Child("quick_" + module.rpartition(".")[2], *arguments, **options)


class Notes:
    """A reporter that remembers, and may stand for a kill in a phase."""

    def __init__(self, killed_in=None):
        self.started, self.said, self.phases, self.killed_in = time.monotonic(), [], [], killed_in

    def say(self, text):
        self.said.append(text)

    def phase(self, name):
        if self.killed_in and self.killed_in in name:
            raise Enough
        self.phases.append(name)
        return nullcontext()


class Enough(Exception):  # noqa: N818 (stands for a kill)
    pass


def measure(experiment, registry=None, gate=None, out=None, fresh=False, reporter=None):
    command = "runner ablate small.yaml"
    return ablate(experiment, registry or Registry(), Workspace(), out, fresh, command, gate, reporter or Notes())


def passes(recipe, registry, stages, seconds):
    assert 0 < seconds < 600
    assert set(stages) <= set(recipe.stages)
    return Verdict(Outcome.PASS, "Exact", f"{len(stages)} stages are the same bits", {})


@pytest.mark.usefixtures("migrated_workspace", "quick_children")
def test_an_interrupted_ablation_goes_on_to_its_report_and_mlflow(experiment):
    """And measured once, given again it is refused; the folder has all that it takes to look again."""
    given = experiment(cases={"three": {"set": ["data.followers=2"], "published": {"phase 1": 1.5}}})
    with pytest.raises(Enough):
        measure(given, gate=passes, reporter=Notes("round 2 of 3"))
    (log,) = (Workspace().root / "ablations").glob(f"*/{ROUNDS}")
    assert (log.parent / "locks" / "three" / "recipe.lock.yaml").is_file()  # as it was when it began
    before = log.read_bytes()
    assert before.count(b'"round"') == 1
    assert before.count(b'"prepared"') == 3
    with log.open("ab") as file:
        file.write(b'{"session": 1, "round": 2, "upd')  # torn by the kill
    notes = Notes()
    done = measure(given, gate=passes, reporter=notes)
    assert any(name.startswith("three: round 3 of 3") for name in notes.phases)
    assert notes.said == [
        f"continuing in {done.folder}", "three: 600 s are enough for every variant that starts as fast as the baseline",
    ]  # fmt: skip
    assert log.read_bytes().startswith(before)
    lines = [json.loads(line) for line in log.read_bytes().splitlines() if b'"round"' in line]
    assert [(each["round"], each["process"]) for each in lines] == [(1, 1), (2, 2), (3, 3)]
    assert log.read_bytes().count(b'"prepared"') == 3  # what compilation takes is known from the first process
    assert done.folder == str(log.parent)
    check_report(done, log.parent)
    check_mlflow(done)
    with pytest.raises(UsageError, match="--fresh"):  # so that the next one begins anew
        measure(experiment(cases={"three": {"set": ["data.followers=2"]}}), out=log.parent)


def check_report(done, out):
    (case,) = done.cases
    assert [variant.name for variant in case.variants] == ["baseline", "all"]
    assert done.exit_code in (ExitCode.DONE, ExitCode.INCONCLUSIVE)
    whole = case.named("all")
    assert whole.stages == STAGES
    assert whole.verdict == "PASS"
    assert (whole.ratio.rounds, whole.ratio.processes) == (3, 3)
    assert whole.peak_memory > 2**20
    assert whole.throughput.per_second > 0
    assert sum(whole.throughput.shares.values()) == pytest.approx(1.0, abs=0.01)
    assert case.cost.counted_flop > case.cost.least_flop > 0
    report = (out / "README.md").read_text()
    assert "| all | " in report.replace("all = phase 1", "all")
    assert (out / "ratios.png").stat().st_size > 1000
    assert json.loads((out / RESULT).read_text())["variants"][1]["verdict"] == "PASS"
    assert set(load(out / "recommended-three.yaml", (), Registry()).stages) <= set(STAGES)


def check_mlflow(done):
    client = Store(Workspace()).client
    parent = client.get_run(done.run_id)
    assert (parent.info.status, parent.data.tags["kind"]) == ("FINISHED", "ablation")
    assert parent.info.run_name == f"ablation {Path(done.folder).name}"
    assert parent.info.end_time - parent.info.start_time >= 1000 * done.seconds - 1
    told = parent.data.tags["mlflow.note.content"]
    assert told.startswith("* **recipe**: `marl_phase1`, from `")
    assert told.index("* **result**: three: use ") < told.index("\n\n## three\n") < told.index("\n| all")
    assert "data.followers=2" in parent.data.tags["overrides"].split(", ")
    assert "README.md" in {file.path for file in client.list_artifacts(done.run_id)}
    below = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{done.run_id}' and tags.verdict = 'PASS'"
    )
    (whole,) = below
    assert whole.data.metrics["ratio"] == pytest.approx(done.cases[0].named("all").ratio.value)
    assert whole.data.metrics["perf/update_ms"] == pytest.approx(done.cases[0].named("all").steady_ms)
    assert whole.data.tags["stages"] == ",".join(STAGES)
    assert whole.data.tags["kind"] == "variant"
    assert whole.info.run_name == f"three all of ablation {Path(done.folder).name}"
    assert "data.followers=2" in whole.data.tags["overrides"].split(", ")
    assert len(client.get_metric_history(whole.info.run_id, "rounds/update_ms")) == 3


@pytest.mark.usefixtures("migrated_workspace", "quick_children")
def test_a_variant_that_breaks_is_missing_with_its_own_words(experiment, tmp_path):
    plugin = tmp_path / "breaks.py"
    plugin.write_text(
        "import os\n"
        "from runner.api import Exact, Stage, StageConfig\n"
        "class BreaksConfig(StageConfig):\n    kind = 'breaks'\n    phase = 3\n"
        "    wraps = frozenset({'update'})\n"
        "    def contract(self, setting):\n        return Exact()\n"
        "    implementation = 'Breaks'\n"
        "class Breaks(Stage):\n"
        "    def attach(self, pipeline):\n        pipeline.slots.wrap('update', self.broken)\n"
        "    def broken(self, step):\n"
        "        def update(*arguments):\n            print('no answer')\n            raise ValueError('boom')\n"
        "        return update\n"
    )
    registry = Registry([plugin])
    path = tmp_path / "experiment.yaml"
    experiment()
    written = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(written | {"set": [*written["set"], "optimization.breaks=on"]}))
    done = measure(load_experiment(path, (), registry), registry)
    (case,) = done.cases
    assert "ValueError: boom" in case.missing["all"]
    assert done.exit_code is ExitCode.INCONCLUSIVE
    (report,) = (Workspace().root / "ablations").glob("*/README.md")
    assert "boom" in report.read_text()
    assert (report.parent / "locks" / "recipe" / "recipe.lock.yaml").is_file()


@pytest.mark.usefixtures("migrated_workspace")
def test_a_folder_of_another_ablation_is_left_alone(experiment, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "ablation.json").write_text('{"name": "other", "digest": "x"}')
    with pytest.raises(UsageError, match=r"another ablation \(code, digest, log format, machine, name, torch differ\)"):
        measure(experiment(), out=out)
    assert list(out.iterdir()) == [out / "ablation.json"]


class Actor:
    """A child in name only, with luck of its own. To start takes a second, an update another, the rest nothing."""

    count = 1

    now: ClassVar[float] = 0.0
    started: ClassVar[list] = []  # stages of each, and its folder for what it compiles
    failing: ClassVar[set] = set()  # the last of a variant's stages, and which of its processes does not start
    luck: ClassVar[random.Random]

    def __init__(self, module, recipe=None, count=1, *, plugin_files=(), options=None):
        self.options, self.stages = options, tuple(recipe.stages) if recipe else ()
        self.batch_size = recipe and recipe.train.batch_size
        if recipe:
            self.started.append((self.stages, options["compiled"]))
            self.life = sum(each == self.started[-1] for each in self.started)
            self.seconds = 0.01 * (0.5 if self.stages else 1.0) * math.exp(self.luck.gauss(0, 0.002))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def answer(self):
        Actor.now += LIMIT_SECONDS
        return {"default_flops": 1.0, "relaxed_flops": 1.0, "relaxed_error": 0.0, "copy_bytes": 1.0, "half_flops": {}}

    def ask_each(self, command, arguments, timeout=300.0):
        assert len(arguments) == 1
        return [self.ask(command, timeout)]

    def ask(self, command, timeout=300.0):
        if command == "prepare" and (self.stages[-1:], self.life) in self.failing:
            raise ChildError(Cause.CRASHED, "no luck at all")
        Actor.now += command in ("prepare", "update")
        return {
            "prepare": {
                "first_s": 0.0,
                "overhead_s": 0.0,
                "block_s": 1.0,
                "train_s": 0.0,
                "batch_size": self.batch_size,
            },
            "record": {"batches": b""},
            "make": {"windows": b""},
            "judge": {"updates": 13, "caught": "", "reason": ""},
            "cost": {"flop": 1, "optimizer_bytes": 1, "least": None},
            "memory": {"free_bytes": 2**40, "own_bytes": 1, "host_bytes": 1, "device_bytes": None},
            "update": {"seconds": self.seconds, "contention": {"waited": 0.0, "other_cores": 0.0}},
            "train": {"seconds": 1.0, "done": 1, "share": 0.1, "updates": 1, "spent": {}},
        }[command]


@pytest.fixture
def notes():
    return Notes()


@pytest.fixture
def acted(experiment, monkeypatch, tmp_path, notes):
    """Measures with actors; returns the case's log."""
    for name in ("Child", "ChildGroup"):
        monkeypatch.setattr(f"runner.ablation.measurement_rounds.{name}", Actor)
    monkeypatch.setattr("runner.ablation.measurement_rounds.time", SimpleNamespace(monotonic=lambda: Actor.now))
    monkeypatch.setattr(Actor, "now", 0.0)
    monkeypatch.setattr(Actor, "started", [])
    monkeypatch.setattr(Actor, "luck", random.Random(0), raising=False)

    def acted(seconds=1e6, failing=(), latest=None, variants=("alone", "all"), **rounds):
        monkeypatch.setattr(Actor, "failing", set(failing))
        given = experiment(variants=list(variants), rounds=rounds or {"least": 3, "most": 60})
        (case,) = given.cases
        with closing(MeasurementLog(tmp_path / "log", {})) as log:
            Measurement(case, given.config, Registry(), log, notes, Stop()).run(seconds, latest)
            return log.of("")

    return acted


def test_all_are_started_anew_every_four_rounds_and_find_what_they_have_compiled(acted):
    log = acted()
    assert [(each["round"], each["process"]) for each in log.rounds] == [(n, (n + 3) // 4) for n in range(1, 21)]
    assert [len(each["train"]) > 0 for each in log.rounds] == [True, False] * 10
    assert log.values("done") == ["every interval is within +-2.0% after 20 rounds in 5 processes"]
    assert set(Counter(Actor.started).values()) == {5}  # every one in a folder of its own, five times
    assert len(set(Actor.started)) == 5
    assert len(log.values("prepared")) == 5
    assert {log.ratio(name).processes for name in ("all", "forward_cache")} == {5}


@pytest.mark.parametrize(("seconds", "processes"), [(135.0, 5), (159.0, 5), (161.0, 6)])
def test_there_are_five_processes_and_more_if_they_fit_in_the_budget(acted, notes, seconds, processes):
    """Five take turns: five seconds to start, and twenty for four rounds."""
    log = acted(seconds, least=60, most=60)
    assert notes.said == ["600 s are enough for every variant that starts as fast as the baseline"]
    assert log.values("done") == [f"the budget was spent after {4 * processes} rounds in {processes} processes"]


def test_what_does_not_fit_into_the_budget_is_left_out_and_said_before_it_is_begun(acted, notes):
    log = acted(seconds=110.0)  # four that take 25 s, and the limit
    reason = "did not fit the budget of 600 s; --budget 650 is enough for all"
    assert log.failed == {"merged_critic_loss": reason}
    assert len(Actor.started) == 4 * 5
    assert Actor.now <= 110
    assert notes.said == [
        "600 s are enough for: all, forward_cache. Left out: merged_critic_loss (each variant starts 5 processes, "
        "1.0 s each); --budget 650 is enough for all"
    ]


def test_a_budget_without_room_for_a_single_variant_is_refused(acted):
    remedy = "--budget 620 would be, --budget [0-9]+ is enough for all$"
    with pytest.raises(UsageError, match=rf"600 s are not enough to compare a single variant.*; {remedy}"):
        acted(seconds=50.0)
    assert len(Actor.started) == 2


def test_a_budget_too_small_for_five_processes_has_room_for_one_variant_in_three(acted, notes):
    log = acted(seconds=60.0)
    assert log.values("done") == ["the budget was spent after 12 rounds in 3 processes"]
    assert Actor.now <= 60
    (said,) = notes.said
    assert "are enough for: all. Left out: forward_cache, merged_critic_loss (" in said
    assert said.endswith("starts 3 processes, 1.0 s each); --budget 700 is enough for all")


def test_a_machine_that_becomes_slower_gets_fewer_processes(acted, monkeypatch):
    """And the budget is kept to."""
    ask = Actor.ask

    def slower(self, command, timeout=300.0, *arguments):
        Actor.now += command == "update" and Actor.now > 60
        return ask(self, command, timeout, *arguments)

    monkeypatch.setattr(Actor, "ask", slower)
    log = acted(135.0, least=60, most=60)
    assert log.values("done") == ["the budget was spent after 12 rounds in 3 processes"]
    assert Actor.now <= 135


@pytest.mark.parametrize(("latest", "is_measured"), [(None, False), (160.0, True)])
def test_a_variant_that_compiles_alone_may_use_the_time_of_the_gate(acted, monkeypatch, latest, is_measured):
    ask = Actor.ask
    compiled = []

    def compiling(self, command, timeout=300.0, *arguments):
        if command == "prepare" and self.stages and not compiled:
            Actor.now += min(timeout, 70)
            if timeout < 70:
                raise ChildError(Cause.HUNG, "no answer")
            compiled.append(True)
        return ask(self, command, timeout, *arguments)

    monkeypatch.setattr(Actor, "ask", compiling)
    log = acted(80.0, latest=latest, variants=("all",))
    assert (log.ratio("all") is not None) is is_measured
    assert Actor.now <= (latest or 80)


def test_what_takes_too_long_to_compile_is_left_out_and_the_others_go_on(acted, monkeypatch):
    ask = Actor.ask

    def compiling(self, command, timeout=300.0, *arguments):
        if command == "prepare" and self.stages[-1:] == ("forward_cache",):
            Actor.now += timeout
            raise ChildError(Cause.HUNG, "no answer")
        return ask(self, command, timeout, *arguments)

    monkeypatch.setattr(Actor, "ask", compiling)
    log = acted(140.0)
    assert log.failed == {
        "forward_cache": "the budget left it 16 s to start and compile, which were too few; "
        "--budget 1200 leaves it more",
    }
    assert Actor.now <= 140
    assert log.ratio("merged_critic_loss").processes == 5


def test_a_variant_whose_next_process_does_not_start_is_missing_and_the_others_go_on(acted):
    log = acted(failing=[(("forward_cache",), 3)])
    assert log.failed == {"forward_cache": "no luck at all"}
    assert log.ratio("all").processes == 5
    assert log.values("done") == ["every interval is within +-2.0% after 20 rounds in 5 processes"]


def test_a_baseline_that_does_not_start_again_ends_the_ablation(acted):
    with pytest.raises(RunnerError, match="the baseline cannot be measured: no luck at all"):
        acted(failing=[((), 2)])


def test_turns_are_by_chance_and_the_same_again():
    """So that load which comes back once a round meets everybody, and not the same one each time."""
    names = list("abcde")
    rounds = [order(names, number) for number in range(500)]
    assert rounds == [order(names, number) for number in range(500)]
    assert all(sorted(each) == names for each in rounds)
    places = Counter((name, place) for each in rounds for place, name in enumerate(each))
    assert len(places) == 25
    assert all(70 < count < 130 for count in places.values())
    again = sum(first[0] == second[0] for first, second in pairwise(rounds))
    assert 60 < again < 140


@dataclass
class Log:
    entries: list

    def add(self, **entry):
        self.entries.append(entry)

    def of(self, case):
        return CaseLog(self.entries)


def test_the_gate_is_asked_last_about_what_only_trainings_can_show(experiment, monkeypatch):
    monkeypatch.setattr(AmpConfig, "inactive", lambda *_: None)  # on any processor
    asked = []

    def gate(recipe, registry, stages, seconds):
        asked.append(stages)
        return Verdict(Outcome.PASS, "Exact", "the same bits", {})

    given = experiment("optimization.amp=on", variants=["all", "alone"])
    (case,) = given.cases
    Measurement(case, given.config, Registry(), Log([]), Notes(), Stop()).judge(gate, time.monotonic() + 60)
    assert asked[:2] == [("forward_cache",), ("merged_critic_loss",)]
    assert {stages[-1] for stages in asked[2:]} == {"amp"}
    assert len(asked) == 4


def test_the_gate_is_asked_once_for_every_set_that_was_measured(experiment):
    asked = []

    def gate(recipe, registry, stages, seconds):
        asked.append(stages)
        return Verdict(Outcome.FAIL, "Exact", "actor.0.weight differs in critic_step", {})

    given = experiment(variants=["all", "alone", "phases", "all_but"])
    log = Log([{"case": "", "variant": "all", "verdict": {"outcome": "PASS"}},
                   {"case": "", "variant": "forward_cache", "failed": "no memory"}])  # fmt: skip
    (case,) = given.cases
    measurement = Measurement(case, given.config, Registry(), log, Notes(), Stop())
    measurement.judge(gate, time.monotonic())
    assert asked == []  # no time was left
    measurement.judge(gate, time.monotonic() + 60)
    assert asked == [("merged_critic_loss",)]
    assert log.entries[-1]["verdict"]["outcome"] == "FAIL"


def test_memory_of_a_child_is_its_own(tmp_path):
    """Started from a process that holds much, as the parent of an ablation may."""
    code = (
        "import subprocess, sys\n"
        "held = bytearray(600 * 2**20)\n"
        "child = 'from runner.system.hardware import peak_host_memory; print(peak_host_memory())'\n"
        "print(subprocess.run([sys.executable, '-c', child], capture_output=True, text=True, check=True).stdout)\n"
    )
    peak = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 5 * 2**20 < peak < 500 * 2**20


@pytest.mark.usefixtures("migrated_workspace", "quick_children")
def test_what_does_not_do_the_baselines_work_has_no_ratio(tmp_path):
    registry = Registry([Path(__file__).parent / "fakes.py"])
    path = tmp_path / "experiment.yaml"
    off = [f"optimization.{kind}=off" for kind in ("fused_optimizer", "heap_retention")]
    sets = ["device=cpu", "model.widths=[8]", *off, "optimization.skips_every_second={after: 4}"]
    settings = {"kind": "ablation", "name": "fakes", "recipe": "digits_classifier", "set": sets,
                "variants": ["all"], "budget": 6000, "rounds": {"least": 3, "most": 3}}  # fmt: skip
    path.write_text(yaml.safe_dump(settings))
    done = measure(load_experiment(path, (), registry), registry)
    fake = done.cases[0].variants[1]
    assert fake.effect == "invalid"
    assert "'modules model.weight' did not change in" in fake.caught
    assert done.exit_code is ExitCode.GATE_FAILED
    report = (Path(done.folder) / "README.md").read_text()
    assert f"{fake.name} has no ratio, because it does not do the baseline's work" in report
    assert re.search(r"\| - \| invalid \| - \| - \|", report)
