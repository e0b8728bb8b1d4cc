"""Profile of an update's memory: tables, plot, and the verb."""

import io
import json

import pytest
from running import forked, settings_of, tiny

from runner.ablation.memory_profile import (
    FIGURES,
    LONGEST_TIMELINE,
    profile_memory,
    show,
    thinned,
)
from runner.ablation.tracked_update import MemorySample
from runner.plugin.registry import Registry
from runner.system.console import Console
from runner.system.errors import StorageError, UsageError
from runner.tracking import Workspace

OFF = {
    "shakespeare_gpt": ["optimization.amp=off"],
    "graf": ["optimization.heap_retention=off"],
    "marl_baseline": [],
}


@pytest.fixture(scope="module", params=OFF)
def profiled(request, tmp_path_factory):
    workspace = Workspace(tmp_path_factory.mktemp("memory"))
    return profile_memory(tiny(request.param, *OFF[request.param]), Registry(), workspace, None, 1)


def text_of(profile, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show(profile, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal(profiled, width):
    lines = text_of(profiled, width).splitlines()
    # A path is never broken.
    lines = [line for line in lines if str(profiled.folder) not in line]
    assert max(map(len, lines)) <= width
    assert lines[0].startswith(f"{profiled.recipe}: one update on the CPU, ")


def test_the_plot_and_the_figures_are_in_the_workspace(profiled):
    pytest.importorskip("matplotlib")
    (plot,) = profiled.plots
    assert plot.read_bytes().startswith(b"\x89PNG")
    figures = json.loads((profiled.folder / FIGURES).read_text())
    (rows,) = figures.values()
    assert max(size for _, size, _ in rows) == profiled.update
    assert profiled.folder.parent.name == "profiles"


def test_the_largest_holders_come_first(profiled):
    sizes = [item.bytes for item in profiled.held]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(item.saved for item in profiled.held) == profiled.saved
    data = json.loads(json.dumps(profiled.data(), allow_nan=False))
    assert data["held"][0]["bytes"] == sizes[0]


def test_a_timeline_keeps_its_peaks():
    samples = [MemorySample(number / 1e3, number % 997, "loss") for number in range(12_345)]
    short = thinned(samples)
    assert len(short) <= LONGEST_TIMELINE
    assert max(sample.bytes for sample in short) == 996
    assert [sample.seconds for sample in short] == sorted(sample.seconds for sample in short)
    assert thinned(samples[:10]) == samples[:10]


def test_compiled_code_is_refused_with_what_to_do():
    recipe = tiny("shakespeare_gpt", "optimization.amp=off", "optimization.compile=on")
    with pytest.raises(UsageError, match=r"compile: .*optimization\.compile=off.*--metric memory"):
        profile_memory(recipe, Registry(), Workspace(), None, 1)


def test_figures_are_never_overwritten(tmp_path):
    (tmp_path / FIGURES).write_text("mine")
    with pytest.raises(UsageError, match=r"holds a memory\.json"):
        profile_memory(tiny("marl_baseline"), Registry(), Workspace(), tmp_path, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--out"):
        profile_memory(tiny("marl_baseline"), Registry(), Workspace(), tmp_path / "file" / "x", 1)


def test_the_verb_prints_one_json_object(tmp_path):
    out = tmp_path / "out"
    sets = settings_of("marl_baseline")
    child = forked("profile", "marl_baseline", *sets, "--memory", "--updates", "1", "--out", str(out), "--json")
    assert child.returncode == 0, child.stderr
    data = json.loads(child.stdout)
    assert data["timeline"] == str(out / FIGURES)
    assert data["update"] > data["saved"] > 0
