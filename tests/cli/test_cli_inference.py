"""``runner verify --of`` and ``runner ablate --of``: a recipe's section ``inference`` on the model of a run."""

import json
from pathlib import Path

import pytest
from running import forked, result_of, train_here

pytestmark = pytest.mark.usefixtures("migrated_workspace")


def test_stages_are_proven_on_the_model_of_a_run_and_that_is_kept():
    run = train_here("digits_classifier")
    found = result_of(forked("verify", "digits_classifier", "inference.channels_last=on", "--of", "latest", "--json"))
    assert found["verdict"] == "PASS"
    assert [row["name"] for row in found["stages"]] == ["channels_last", "all"]
    assert json.loads(Path(run.run_dir, "verification.json").read_text())["outcome"] == "PASS"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("verify", "digits_classifier", "--of", "latest"), "has no section 'inference'"),
        (("verify", "shakespeare_gpt", "inference.compile=on", "--of", "latest"), "is for model 'gpt', and"),
        (("verify", "digits_classifier", "inference.compile=on", "--of", "nobody"), "nobody"),
        (("ablate", "digits_classifier", "inference.compile=on", "--of", "latest", "--budget", "2"), "too small"),
        (("verify", "digits_classifier", "inference.distil=on", "--of", "latest"), "distil: layers"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(arguments, told):
    train_here("digits_classifier", "train.epochs=1")
    child = forked(*arguments, "--quiet")
    assert child.returncode == 2
    assert told in child.stderr
    assert "Traceback" not in child.stderr
