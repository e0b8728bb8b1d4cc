"""Ablation by memory: products, resuming, reports, and real child processes."""

import io
import json
import math
import random
import time
from contextlib import closing, nullcontext
from dataclasses import replace

import pytest
from running import forked, settings_of, tiny

from runner.ablation.experiment import Case
from runner.ablation.measurement_log import MeasurementLog
from runner.ablation.memory_ablation import MemoryCase
from runner.ablation.memory_report import markdown, percent, show
from runner.ablation.memory_result import LARGEST_DISAGREEMENT, MemoryResult, remaining, share
from runner.ablation.update_memory import UpdateMemory
from runner.child.spawn import Child
from runner.plugin.registry import Registry
from runner.system.console import Console
from runner.system.errors import ExitCode
from runner.verify.variants import ALL, BASELINE

STAGES = ("fused_optimizer", "gradient_accumulation", "activation_checkpointing", "heap_retention")
BASE = 50 * 2**20


class Silence:
    """Reporter that shows nothing."""

    started = 0.0

    def say(self, text):
        """Ignores a message."""

    def phase(self, name):
        """Shows no phase."""
        return nullcontext()


def memory_of(size, grown=None):
    return UpdateMemory(size, size // 2, size, size if grown is None else grown, 2**20)


def memory_case(log, *stages):
    sets = ["optimization.amp=off", *(f"optimization.{kind}=off" for kind in STAGES if kind not in stages)]
    recipe = tiny("shakespeare_gpt", *sets, *(f"optimization.{kind}=on" for kind in stages))
    return MemoryCase(Case("", recipe, (), {}), Registry(), log, Silence(), stop=False)


def add(log, variant, memory, process=400 * 2**20):
    figures = {name: getattr(memory, name) for name in ("update", "saved", "tracked", "grown", "state")}
    log.add(case="", variant=variant, memory=figures, process=process, notes={}, threads=1)


@pytest.fixture
def log(tmp_path):
    with closing(MeasurementLog(tmp_path / "log", {})) as log:
        yield log


def measured(log, sizes, whole, *, stages=STAGES):
    """The result for sizes of single stages and of all of them."""
    case = memory_case(log, *stages)
    add(log, BASELINE, memory_of(BASE))
    for kind, size in sizes.items():
        add(log, kind, memory_of(size))
    add(log, ALL, memory_of(whole))
    return case.result()


@pytest.mark.parametrize("seed", range(50))
def test_remaining_shares_are_multiplied(log, seed):
    draw = random.Random(seed)
    sizes = {kind: draw.choice([BASE, draw.randint(1, 2 * BASE)]) for kind in STAGES}
    case = measured(log, sizes, draw.randint(1, BASE))
    assert case.product == pytest.approx(math.prod(size / BASE for size in sizes.values()))
    for kind, size in sizes.items():
        assert (case.named(kind).remaining == 1) == (size == BASE)
    assert case.named(ALL).remaining == case.named(ALL).memory.update / BASE


def test_without_one_stage_there_is_no_product(log):
    case = measured(log, {"fused_optimizer": BASE}, BASE)
    assert math.isnan(case.product)
    assert "product of the stages" not in page(case)


def page(case, **changes):
    return markdown(result_of(case, **changes))


def result_of(*cases, **changes):
    result = MemoryResult(
        name="mine", digest="0", command="runner ablate mine --metric memory", machine={"cpu": "x"},
        cases=cases, seconds=1.0, folder="out", interrupted=False,
    )  # fmt: skip
    return replace(result, **changes)


@pytest.mark.parametrize("width", [80, 120, 160])
def test_the_table_fits_the_terminal_and_begins_with_the_update(log, width):
    sizes = dict.fromkeys(STAGES, BASE // 2)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show(result_of(measured(log, sizes, BASE // 8)), console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    head = next(line for line in text.splitlines() if "variant" in line)
    assert head.index("update MiB") < head.index("remaining") < head.index("process MiB")
    assert "product of the stages" in text
    assert "6.2 %" in text.partition("product")[2]
    assert "12.5 %" in text
    assert ("grown MiB" in text) == (width > 100)


def test_the_report_has_every_variant_and_says_what_it_was_not(log):
    case = measured(log, {"fused_optimizer": BASE}, BASE)
    log.add(case="", variant="heap_retention", failed="it broke\nlast line")
    text = page(memory_case(log, *STAGES).result(), interrupted=True)
    assert "not measured: heap_retention: last line" in text
    assert "interrupted" in text
    assert case.failed == {}


@pytest.mark.parametrize(("grown", "apart"), [(BASE, False), (2 * BASE, True)])
def test_two_measurements_that_differ_are_reported(log, grown, apart):
    case = memory_case(log, "fused_optimizer")
    add(log, BASELINE, memory_of(BASE, grown))
    result = case.result()
    assert (result.disagreement > LARGEST_DISAGREEMENT) == apart
    assert ("more than 10%" in page(result)) == apart


def test_what_has_no_tracker_is_compared_by_growth():
    baseline = UpdateMemory(100, 50, 100, 110, 1)
    compiled = UpdateMemory(55, 20, None, 55, 1)
    assert remaining(compiled, baseline) == 0.5
    assert remaining(baseline, baseline) == 1
    assert share(0, 0) == 1
    assert math.isnan(share(1, 0))
    assert (percent(1.0), percent(0.999), percent(math.nan)) == ("100 %", "99.9 %", "-")


def test_json_has_no_numbers_that_are_none(log):
    case = measured(log, {"fused_optimizer": BASE}, BASE)
    data = json.loads(json.dumps(result_of(case).data(), allow_nan=False))
    assert data["metric"] == "memory"
    assert [variant["name"] for variant in data["variants"]] == [BASELINE, ALL, "fused_optimizer"]
    assert data["cases"][0]["product"] is None


def test_exit_codes(log):
    case = measured(log, {}, BASE)
    assert result_of(case).exit_code == ExitCode.DONE
    assert result_of(replace(case, variants=case.variants[:1])).exit_code == ExitCode.INCONCLUSIVE
    assert result_of(case, signal=2).exit_code == 130


def test_after_the_budget_only_the_baseline_is_measured(log, monkeypatch):
    names = []
    monkeypatch.setattr(MemoryCase, "_measure", lambda case, variant: names.append(variant.name))
    memory_case(log, *STAGES).run(deadline=time.monotonic() - 1)
    assert names == [BASELINE]
    failed = {entry["variant"] for entry in log.entries if "failed" in entry}
    assert failed == {ALL, *STAGES}


def test_what_is_in_the_log_is_not_measured_again(log, monkeypatch):
    names = []
    monkeypatch.setattr(MemoryCase, "_measure", lambda case, variant: names.append(variant.name))
    add(log, BASELINE, memory_of(BASE))
    add(log, "fused_optimizer", memory_of(BASE))
    memory_case(log, "fused_optimizer", "gradient_accumulation").run(time.monotonic() + 100)
    assert names == [ALL, "gradient_accumulation"]


def test_two_independent_measurements_of_a_process_agree():
    """The kernel's count of pages and torch's count of storages, of updates of some 50 MiB."""
    sets = ("model.width=64", "data.context=64", "train.batch_size=64", "optimization.amp=off")
    recipe = tiny("shakespeare_gpt", *sets)
    options = {"purpose": "update", "updates": 2}
    with Child("runner.ablation.memory_child", recipe, options=options) as child:
        memory = UpdateMemory(**child.answer()["memory"])
    assert memory.tracked > 10 * 2**20
    if memory.grown is None:
        pytest.skip("this kernel does not let a process reset its high-water mark")
    assert memory.disagreement < LARGEST_DISAGREEMENT


def test_the_verb_measures_and_reports(tmp_path):
    sets = [*settings_of("shakespeare_gpt"), "optimization.amp=off", "optimization.fused_optimizer=off",
            "optimization.gradient_accumulation={micro_batch: 1}"]  # fmt: skip
    out = tmp_path / "out"
    child = forked("ablate", "shakespeare_gpt", *sets, "--metric", "memory", "--out", str(out), "--json")
    assert child.returncode == 0, child.stderr
    data = json.loads(child.stdout)
    baseline, accumulated = data["variants"]
    assert (baseline["name"], accumulated["also"]) == (BASELINE, ["gradient_accumulation"])
    assert baseline["remaining"] == 1
    assert accumulated["remaining"] < 0.9
    assert data["cases"][0]["product"] == accumulated["remaining"]
    assert baseline["process"] > baseline["memory"]["update"]
    assert json.loads((out / "result.json").read_text())["variants"] == data["variants"]
    assert "process MiB" in (out / "README.md").read_text()
    again = forked("ablate", "shakespeare_gpt", *sets, "--metric", "memory", "--out", str(out))
    assert again.returncode == 2
    assert "finished" in again.stderr


def test_a_model_of_a_run_has_no_updates():
    child = forked("ablate", "grasp_serve", "--of", "latest", "--metric", "memory")
    assert child.returncode == 2
    assert "remove --of" in child.stderr


def test_memory_of_several_processes_is_refused(tmp_path):
    path = tmp_path / "several.yaml"
    path.write_text("kind: ablation\nname: several\nrecipe: digits_classifier\nprocesses: 2\n")
    child = forked("ablate", str(path), "--metric", "memory")
    assert child.returncode == ExitCode.USAGE
    assert "processes: 2, and memory is measured in one process; remove it" in " ".join(child.stderr.split())


@pytest.mark.parametrize("option", [["--metric", "memory"], ["--of", "latest"]])
def test_several_processes_are_for_updates(option):
    child = forked("ablate", "digits_classifier", "--nproc", "2", *option)
    assert child.returncode == ExitCode.USAGE
    assert "is for one process; leave --nproc out" in " ".join(child.stderr.split())
