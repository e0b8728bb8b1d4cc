import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from browser import needs_browser, page
from summaries import RETURN, ROWS, SPEED, WORTH, row, single, summary

from runner.plugin.registry import Registry
from runner.study import plan as plan_module
from runner.study.attempts import Used
from runner.study.definition import load_study
from runner.study.plan import Forecast, StudyPlan
from runner.study.report import html, show, show_plan
from runner.study.study_plots import draw
from runner.system import secrets
from runner.system.console import Console
from runner.system.text_lines import figure


def printed(found, width, *where):
    screen = io.StringIO()
    show(found, Console(file=screen, width=width), where)
    return screen.getvalue()


def flat(text):
    return " ".join(text.split())


def figures(found):
    """Every number of the tables, as it is written."""
    shown = [*found.best, *(each for each in found.rows if each.is_recipe)]
    yield from (figure(value) for each in shown for value in each.values.values())
    for each in found.worth:
        yield from (figure(number) for number in (each.on, each.off, each.on - each.off))
        yield from (f"[{figure(each.low)},", f"{figure(each.high)}]", f"({each.trials_on})", f"({each.trials_off})")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("found", [summary(), single()], ids=["several objectives", "one objective"])
def test_no_number_is_torn_and_no_line_is_too_long(found, width):
    text = printed(found, width)
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    assert [number for number in figures(found) if number not in words] == []


@pytest.mark.parametrize("width", [60, 200])
def test_three_objectives_fit_a_narrow_screen(width):
    names = (RETURN, SPEED, "eval/success_rate")
    rows = [replace(ROWS[1], values=dict.fromkeys(names, -12345.678))]
    words = printed(summary(objectives=dict.fromkeys(names, "maximize"), rows=rows), width).split()
    assert words.count("-12,346") >= 3


def test_the_best_come_in_the_order_of_the_first_objective_and_the_recipe_after_them():
    text = printed(summary(), 200)
    places = [
        text.index(part) for part in ("mine: Pareto front", "-0.01235", "-98.77", "the recipe unchanged", "-1,235")
    ]
    assert places == sorted(places)
    assert "0 (recipe)" in text
    assert "merged_critic_loss on, amp {dtype: bf16}, optimizer.actor.lr 0.0001235, gate PASS" in text
    assert "best trial" in printed(single(), 200)


def test_the_recipe_is_not_shown_twice_and_not_without_values():
    best = [replace(ROWS[0], best=True), *ROWS[1:]]
    failed = [replace(ROWS[0], values={}, cause="crashed"), *ROWS[1:]]
    for rows in (best, failed):
        assert "the recipe unchanged" not in printed(summary(rows=rows), 200)


def test_what_decided_and_what_a_stage_was_worth_is_said():
    text = flat(printed(summary(), 200))
    assert "trials: optimizer.actor.lr 71%, optimization.amp 29% stages" in text
    assert "merged_critic_loss eval: return -12,346 (13) -9,877 (11) -2,469 [-7,654, -1,234]" in text
    assert "runner ablate measures a stage alone" in text


def test_budget_failures_and_doubts_are_said():
    text = flat(printed(summary(), 200))
    assert (
        "budget: 7 of 24 trials, 7 min of 13 min, 2.0 h on devices; about 5 min left at this pace "
        "trials: 2 crashed, 3 done, 1 infeasible, 1 out of memory"
    ) in text
    assert "crashed (5, 6): its process was ended by SIGSEGV" in text
    assert "out of memory (4): its processes took 5.1 GiB of host memory, of 4.0" in text
    assert "overhead per trial: 3.2 s (median)" in text
    assert "2 trials were timed" in text


def test_a_study_that_is_done_has_nothing_left():
    text = printed(summary(used=Used(24, 400.0, 400.0), seconds_left=0.0), 200)
    assert "24 of 24 trials" in text
    assert "left at this pace" not in text


def test_a_study_without_a_best_trial_says_so():
    empty = summary(rows=ROWS[4:], importance={}, worth=[], overhead_s=None, disturbed=0)
    text = printed(empty, 60, "report: /a/long/path/that/is/never/folded/on/any/screen/however/narrow/report.html")
    assert text.startswith("mine: no trial has a valid result yet")
    assert "report:\n/a/long/path/that/is/never/folded/on/any/screen/however/narrow/report.html\n" in text
    assert "stages" not in text


def test_what_looks_like_markup_is_shown_as_it_is():
    rows = [replace(ROWS[1], settings={"model.[bold]x": "[red]no[/red]"})]
    text = printed(summary(name="[bold]mine", rows=rows, importance={"eval/[b]": {"[i]": 1.0}}), 200)
    for part in ("[bold]mine", "model.[bold]x [red]no[/red]", "eval/[b], from", "trials: [i] 100%"):
        assert part in text


class Page(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words.append(data)

    def rows(self):
        return [attributes.get("class") for tag, attributes in self.tags if tag == "tr"]


def test_the_page_needs_nothing_beside_it(tmp_path):
    pictures = draw(summary(), tmp_path)
    text = html(summary(), pictures, "a hint")
    page = Page(text)
    sources = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert len(sources) == len(pictures) == 6
    for source, picture in zip(sources, pictures, strict=True):
        kind, _, data = source.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data) == picture.read_bytes()
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    assert not re.search(r"@import|url\(|https?://", text)
    assert "a hint" not in text


def test_the_page_has_every_trial_and_what_became_of_it():
    text = html(summary(), [], "a hint")
    page = Page(text)
    marks = [mark for mark in page.rows() if mark is not None]
    assert marks == ["", "best", "best", *["off"] * 4, "", "off"]
    words = flat(" ".join(page.words))
    for part in (
        "a hint",
        "mine",
        "/studies/mine.yaml",
        "0 (recipe)",
        "-1,235",
        "12,346",
        "its process was ended by",
    ):
        assert part in words
    for part in ("71 %", "29 %", "-7,654 to -1,234", "perf/update_ms is 2.5 beyond its bound", "gate PASS"):
        assert part in words
    assert "budget: 7 of 24 trials" in words


def test_the_page_has_the_command_of_the_dashboard_and_says_what_is_best_without_a_colour():
    words = flat(" ".join(Page(html(summary(), [], "a hint")).words))
    assert "optuna-dashboard sqlite:////here/optuna.db" in words
    assert "★ 1" in words
    assert "★: on the Pareto front" in words


def test_a_page_without_any_value_is_a_page():
    empty = summary(rows=[], importance={}, worth=[], overhead_s=None, disturbed=0, seconds_left=None)
    words = Page(html(empty, [], "nothing yet")).words
    assert any("nothing yet" in each for each in words)


def test_what_looks_like_a_tag_is_text():
    evil = "<script>alert(1)</script>"
    rows = [
        row(0, 1.0, 2.0, cause="crashed", state="FAIL", reason=evil, settings={f"model.{evil}": evil}),
        row(1, 1.0, 2.0, verdict=evil),
    ]
    found = summary(
        name=evil, file=f"/{evil}", rows=rows, objectives={RETURN: "maximize"},
        importance={evil: {f"model.{evil}": 1.0}}, worth=[replace(WORTH[0], stage=evil, objective=evil)],
    )  # fmt: skip
    text = html(found, [], evil)
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<script" not in text
    assert "".join(page.words).count(evil) >= 10


WIDER = """<body><script>
for (const width of [1400, 390]) {
  const frame = document.createElement("iframe");
  frame.width = width;
  frame.srcdoc = document.querySelector("#page").innerHTML;
  frame.onload = () => {
    const all = [...frame.contentDocument.querySelectorAll("html, body, div, p, li, td, img")];
    const wider = all.filter(
      each => each.scrollWidth > each.clientWidth && each.clientWidth || each.getBoundingClientRect().right > width
    );
    const colour = getComputedStyle(frame.contentDocument.body).backgroundColor;
    document.body.dataset["at" + width] = wider.length + " of " + all.length + ", " + colour;
  };
  document.body.append(frame);
}
</script>"""


@needs_browser
def test_the_page_fits_a_wide_screen_and_a_phone_and_is_dark_where_that_is_wanted(tmp_path):
    rows = [replace(each, reason=f"{each.reason} {'long' * 60}" if each.reason else "") for each in ROWS]
    found = summary(rows=rows, dashboard=f"optuna-dashboard sqlite:////{'long' * 60}/optuna.db")
    told = html(found, draw(found, tmp_path), "a hint")
    (tmp_path / "page.html").write_text(f'<template id="page">{told}</template>{WIDER}')
    shown = page((tmp_path / "page.html").as_uri(), tmp_path, "--blink-settings=preferredColorScheme=0")
    at = dict(re.findall(r'data-at(\d+)="(.*?)"', shown))
    assert at.keys() == {"1400", "390"}
    assert {re.sub(r"of \d+", "of all", each) for each in at.values()} == {"0 of all, rgb(18, 18, 18)"}


def test_no_secret_is_in_the_page(monkeypatch):
    for name in ("_known", "_pattern"):
        monkeypatch.setattr(secrets, name, getattr(secrets, name))  # as it was before, when the test is over
    secrets.register("opensesame7")
    rows = [
        row(0, 1.0, 2.0, best=True, settings={"model.note": "opensesame7"}),
        row(1, state="FAIL", cause="failed", reason="no route to postgresql://me:hunter2hunter2@host/db"),
    ]
    page = html(summary(rows=rows), [], "opensesame7")
    assert not re.search("opensesame7|hunter2hunter2", page)
    assert "postgresql://me:**********@host/db" in page


PLAN = StudyPlan(
    name="mine", recipe="/recipes/marl_phase2.yaml",
    space=(
        ("optimization.merged_critic_loss", "one of off, on", ""),
        ("optimization.stacked_agents", "one of off, on", "forward_cache, merged_critic_loss"),
        ("optimizer.actor.lr", "0.0001 to 0.003, logarithmic", ""),
    ),
    configurations=None, trials=24, trainings=48, budget="trials 24, parallel 1",
    sampler="tpe", pruner="off", limits=("seconds 180", "silence 600"), remarks=("perf/x is a speed",),
    forecast=Forecast(start_seconds=4.56, seconds_a_step=0.01, trial_seconds=90.4, study_seconds=9000.0),
)  # fmt: skip


@pytest.mark.parametrize("width", [60, 200])
def test_a_plan_says_what_will_be_tried_and_what_it_costs(width):
    screen = io.StringIO()
    show_plan(PLAN, Console(file=screen, width=width))
    text = screen.getvalue()
    assert max(map(len, text.splitlines())) <= width
    words = flat(text)
    assert "budget: trials 24, parallel 1, 48 trainings; the space is continuous" in words
    assert "sampler tpe, pruner off; limits of a training: seconds 180, silence 600" in words
    assert "forecast: 90 s per trial (4.6 s of it start-up), 2.5 h in total" in words
    assert "* perf/x is a speed" in words
    for part in ("merged_critic_loss", "optimizer.actor.lr", "0.0001", "0.003,", "logarithmic"):
        assert part in text.split()


def test_a_plan_counts_configurations_and_may_have_no_forecast():
    screen = io.StringIO()
    show_plan(replace(PLAN, configurations=12345.0, forecast=None), Console(file=screen, width=200))
    assert "12,345 configurations" in screen.getvalue()
    assert "forecast" not in screen.getvalue()


def test_a_plan_without_a_forecast_gives_the_reason(monkeypatch, tmp_path):
    """Everything else is known without it."""
    reason = "no forecast: the recipe reported fewer than 4 steps"

    def fail(*_):
        raise plan_module.NoForecastError(reason)

    monkeypatch.setattr(plan_module, "_forecast", fail)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "kind: study\nname: mine\nrecipe: digits_classifier\n"
        "space: {optimizer.lr: {float: [1e-4, 1e-2]}}\nobjectives: {eval/accuracy: maximize}\nbudget: {trials: 2}\n"
    )
    planned = plan_module.plan(load_study(path, [], Registry()), [], forecast=True)
    assert planned.forecast is None
    assert reason in planned.remarks
    assert planned.trials == 2
