"""The verb ``ablate``: what it asks for and what it says; the measuring itself is tested with the proof."""

import json
import signal

import pytest
import typer
from ablations import analysed, case, result
from typer.testing import CliRunner

from runner.ablation.recommendation import recommend
from runner.cli.ablate import ablate
from runner.plugin.registry import Registry
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import ExitCode

FAST = {"stacked_agents": 3.0}
PASSED = {"phases 1-2": "PASS"}


@pytest.fixture
def invoke(monkeypatch):
    app = typer.Typer()
    app.command()(ablate)
    app.callback()(lambda: None)  # or the only verb would have no name
    asked = []

    def invoke(*arguments, factors=FAST, verdicts=PASSED, asked_to_stop=0):
        given = case()
        measured = analysed(given, factors, verdicts=verdicts)

        def measure(*settings):
            asked.append(settings)
            recommendations = (recommend(given, measured, Registry()),)
            return result(measured, recommendations=recommendations, run_id="abc", signal=asked_to_stop)

        monkeypatch.setattr("runner.ablation.ablate.ablate", measure)
        return CliRunner().invoke(app, ["ablate", *arguments]), asked

    return invoke


def test_json_has_what_scripts_need(invoke):
    printed, _ = invoke("marl_phase3", "--json", "--quiet")
    data = json.loads(printed.stdout)
    assert printed.exit_code == ExitCode.DONE
    assert data["schema_version"] == 1
    assert {"baseline", "all"} <= {variant["name"] for variant in data["variants"]}
    assert data["recommendations"][0]["stages"]
    assert data["run_id"] == "abc"


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({}, ExitCode.DONE),
        ({"factors": {}}, ExitCode.INCONCLUSIVE),
        ({"verdicts": {"all": "FAIL"}}, ExitCode.GATE_FAILED),
        ({"verdicts": {"all": "FAIL"}, "asked_to_stop": signal.SIGTERM}, ExitCode.TERMINATED),
    ],
)
def test_the_exit_code_says_what_came_of_it(invoke, settings, code):
    printed, _ = invoke("marl_phase3", **settings)
    assert printed.exit_code == code
    assert "use " in printed.stdout


def test_options_reach_the_measurement(invoke, tmp_path):
    _, asked = invoke("marl_phase3", "--budget", "33", "--out", str(tmp_path), "--fresh", "--set", "seed=9")
    experiment, _, _, out, fresh, *_ = asked[0]
    assert experiment.config.budget == 33.0
    assert experiment.cases[0].recipe.seed == 9
    assert (out, fresh) == (tmp_path, True)


def test_a_mistake_is_said_before_anything_is_measured(invoke):
    printed, asked = invoke("marl_phase3", "--set", "seed=x")
    assert isinstance(printed.exception, RecipeError)
    assert asked == []
