import builtins
import io
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from ablations import OFF, analysed, case, result
from canvases import cut, kept, told, written

from runner.ablation.ablation_plots import PLOT_TITLES, draw
from runner.ablation.recommendation import recommend
from runner.ablation.report import markdown, print_table, show
from runner.plugin.registry import Registry
from runner.system.console import Console
from runner.system.plots import NO_PLOTS

FACTORS = {"stacked_agents": 3.0, "fused_optimizer": 0.5}
VERDICTS = {"all": "FAIL", "phases 1-2": "PASS"}
CASES = [case(f"{n} agents", (*OFF, f"data.followers={n - 1}"), {"phase 1": 1.67}) for n in (2, 4)]


@pytest.fixture(scope="module")
def measured():
    found = [analysed(each, FACTORS, agents=n, verdicts=VERDICTS) for n, each in zip((2, 4), CASES, strict=True)]
    recommendations = tuple(recommend(each, own, Registry()) for each, own in zip(CASES, found, strict=True))
    return result(*found, slope=0.9, recommendations=recommendations)


@pytest.mark.parametrize("width", [60, 80, 159, 160, 200])
def test_tables_fit_the_screen_and_name_every_variant(measured, width):
    screen = io.StringIO()
    show(measured, Console(file=screen, width=width))
    text = screen.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    flat = re.sub(r"\s+", " ", text)
    for variant in measured.cases[0].variants:
        assert variant.name.split()[-1] in flat
    assert "3.00x" in flat
    assert ("published" in flat) == (width >= 160)
    assert "fails in critic_step" in flat
    assert "2 agents: use forward_cache, merged_critic_loss, stacked_agents" in flat


@pytest.mark.parametrize("width", [76, 80, 81, 82])
def test_a_long_name_does_not_push_the_verdict_off_the_screen(width):
    words = {"ratio": "0.67x [0.63, 0.70]", "ms": "17.6", "effect": "unclear", "verdict": "INCONCLUSIVE"}
    screen = io.StringIO()
    rows = [{"variant": name} | words for name in ("activation_checkpointing", "all")]
    print_table(Console(file=screen, width=width), rows, narrowest=len("activation_checkpointing"))
    assert screen.getvalue().count("INCONCLUSIVE") == 2
    assert "activation_checkpointing" in screen.getvalue()


def test_the_report_is_whole(measured):
    text = markdown(measured, ["ratios.png"])
    assert f"![{PLOT_TITLES['ratios.png']}](ratios.png)" in text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[0] == "## Recommendation"
    assert text.index("(ratios.png)") < text.index("## Variants")
    assert NO_PLOTS not in text
    assert "* `fused_optimizer` off: slower: 0.50x [0.50, 0.50]" in text
    assert "1.67x" in text
    assert "Published: somebody" in text
    assert "power 0.90 of its least FLOP" in text
    assert "inactive: cuda_graph: CUDA graphs need a CUDA device" in text
    lines = list(pairwise(text.splitlines()))
    columns = {head: head.count("|") for head, rule in lines if rule.startswith("|---")}
    assert max(columns.values()) <= 10  # wider ones are cut on a page
    assert "| variant | ratio | effect | verdict | training | published |" in columns
    assert "| variant | ms | compile s | warm-up s | break-even | MiB | limit | per s |" in columns
    heads = [(head.count("|"), rule.count("|")) for head, rule in lines if rule.startswith("|---")]
    assert len(heads) > 3
    assert all(head == rule for head, rule in heads)


def test_variants_without_budget_are_listed_with_a_sufficient_one(measured):
    reason = "did not fit the budget of 300 s; --budget 780 is enough for all"
    cases = tuple(replace(item, missing={"compile": reason, "amp": reason}) for item in measured.cases)
    whole = replace(measured, cases=cases)
    expected = f"not measured: compile, amp: {reason}"
    assert markdown(whole, []).count(f"* {expected}\n") == len(cases)
    screen = io.StringIO()
    show(whole, Console(file=screen, width=80))
    assert " ".join(screen.getvalue().split()).count(expected) == len(cases)


@pytest.mark.parametrize("threads", [1, 2, *range(3, 51)])
def test_one_thread_is_singular_everywhere(measured, threads):
    cases = tuple(replace(item, threads=threads) for item in measured.cases)
    whole = replace(measured, cases=cases)
    screen = io.StringIO()
    show(whole, Console(file=screen, width=160))
    words = re.findall(rf"\b{threads} threads?\b", markdown(whole, []) + screen.getvalue())
    assert set(words) == {"1 thread" if threads == 1 else f"{threads} threads"}


def test_pictures_are_drawn(measured, tmp_path):
    assert draw(measured, tmp_path) == ["ratios.png", "training.png", "scaling.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_cases_are_on_one_scale_with_every_number_and_the_counts_and_no_point_is_cut(measured, tmp_path, monkeypatch):
    figures = kept(monkeypatch)
    faster = analysed(CASES[1], FACTORS | {"stacked_agents": 9.0}, agents=4)
    draw(replace(measured, cases=(measured.cases[0], faster)), tmp_path)
    for name in ("ratios", "training"):
        one, *others = figures[name].axes
        limits = {(axes.get_xlim(), axes.get_ylim()) for axes in (one, *others)}
        assert len(limits) == 1
        assert one.get_title().startswith("2 agents: 4 processes, ")
    titles = [axes.get_title() for axes in figures["ratios"].axes]
    counts = ["12 rounds"] * 2 + ["6 rounds"] * 2  # of updates, then of training steps
    assert titles == [f"{n} agents: 4 processes, {count}" for n, count in zip((2, 4, 2, 4), counts, strict=True)]
    assert figures["training"].axes[0].get_title().endswith("4 processes, 6 rounds")
    assert told(figures["ratios"]) == {
        *("faster", "slower", "unclear", "published", "noise: the baseline against itself (A/A)"),
        *("PASS", "FAIL", "not judged"),
    }
    assert told(figures["training"]) == {"collect", "update"}  # nothing that no bar shows
    assert told(figures["scaling"]) == {"baseline", "all stages", "limit of this machine"}
    case, figure = measured.cases[0], figures["ratios"]
    ratios = [f"{item.ratio} {item.verdict or 'not judged'}" for item in case.variants if item.stages]
    assert [text for text in written(figure.axes[0]) if "x" in text] == ratios
    assert "1.67" in written(figure.axes[0])
    assert written(figures["training"].axes[0]) == [f"{1e3 / v.throughput.per_second:.3g}" for v in case.variants]
    assert len(written(figures["scaling"].axes[0])) == 3 * len(measured.cases)
    assert [name for name, figure in figures.items() if cut(figure)] == []


def test_a_variant_that_one_case_lacks_has_its_row_in_both(measured, tmp_path, monkeypatch):
    figures, (first, second) = kept(monkeypatch), measured.cases
    fewer = replace(second, variants=(second.variants[0], *second.variants[2:]))
    draw(replace(measured, cases=(first, fewer)), tmp_path)
    one, other = figures["ratios"].axes[:2]
    assert [text.get_text() for text in one.get_yticklabels()] == [v.name for v in first.variants if v.stages]
    rows = [[text.xy[1] for text in axes.texts if "x" in text.get_text()] for axes in (one, other)]
    assert rows[1] == rows[0][1:]
    alone = replace(second, variants=second.variants[:1])
    assert draw(replace(measured, cases=(first, alone), slope=None), tmp_path) == ["ratios.png", "training.png"]
    titles = [axes.get_title() for axes in figures["ratios"].axes]
    assert titles == ["2 agents: 4 processes, 12 rounds", "4 agents", "2 agents: 4 processes, 6 rounds", "4 agents"]
    assert draw(replace(measured, cases=(alone,), slope=None), tmp_path) == ["training.png"]


def test_without_matplotlib_the_report_says_so(measured, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **settings):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", without)
    assert draw(measured, tmp_path) == []
    assert NO_PLOTS in markdown(measured, [])


def test_what_was_interrupted_says_so(measured):
    assert "interrupted" in markdown(replace(measured, interrupted=True), [])


@pytest.mark.parametrize("width", [80, 120])
def test_what_is_faster_but_unproven_comes_with_a_whole_command(width):
    given, verdicts = CASES[0], {"phase 1": "PASS"}
    found = analysed(given, {"stacked_agents": 3.0, "fused_optimizer": 2.0}, verdicts=verdicts)
    recommendation = recommend(given, found, Registry())
    whole = result(found, recommendations=(recommendation,))
    screen = io.StringIO()
    show(whole, Console(file=screen, width=width))
    assert all(len(line) <= width for line in screen.getvalue().splitlines())
    joined = re.sub(r" \\\n *", " ", screen.getvalue())  # as a shell does
    assert f"    {recommendation.unproven[0].command}\n" in joined
    flat = " ".join(screen.getvalue().split())
    assert "faster, but not proven harmless (the gate has not judged it): " in flat
    assert f"{len(recommendation.unproven) - 3} more in the report" in flat
    assert "the gate has not judged all, phases 1-2, " in flat
    report = markdown(whole, [])
    assert all(f"    {each.command}\n" in report for each in recommendation.unproven)
