"""What all jobs of clusters have: names, quoting, variables without secrets."""

import os
import subprocess

import pytest
from clusters import job
from hostile import NAME, commands_in, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.distributed.batch_job import job_variables, quote_for_bash, refuse_secrets
from runner.system.errors import UsageError
from runner.system.secrets import has_secret

WORDS = ["", "a b", "$(touch owned)", "`touch owned`", "'; touch owned; '", "\n", "a\\", "!x", "-n", "\udce9x", NAME]


def read_by_bash(words):
    """Returns the words that bash makes of quoted ones."""
    script = "printf '%s\\0' x " + " ".join(map(quote_for_bash, words))
    done = subprocess.run(["bash", "-s"], input=script.encode(), capture_output=True, check=True)
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[1:-1]]


def test_bash_reads_the_words_that_were_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_by_bash(WORDS) == WORDS
    assert list(tmp_path.iterdir()) == []
    assert commands_in("".join(map(quote_for_bash, WORDS))) == []


@settings(max_examples=25, deadline=None)
@given(st.lists(texts | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=5))
def test_bash_reads_any_text(words):
    words = [word.replace("\0", "") for word in words]
    assert read_by_bash(words) == words


def test_variables_with_secrets_have_names_only():
    given_variables = {
        "MLFLOW_TRACKING_URI": "https://mlflow.example.org",
        "OPTUNA_STORAGE": "postgresql://user:hunter2hunter2@host/studies",
        "RUNNER_DATA": "",
        "HOME": "/root",
    }
    variables, secrets = job_variables(given_variables)
    assert variables == {"MLFLOW_TRACKING_URI": "https://mlflow.example.org"}
    assert secrets == ("OPTUNA_STORAGE",)


def test_a_script_with_a_secret_is_refused():
    text = "runner run x.yaml tracking.uri=https://user:hunter2hunter2@host"
    assert has_secret(text)
    with pytest.raises(UsageError, match=r"\$\{env:NAME\}"):
        refuse_secrets(text)
    refuse_secrets("runner run x.yaml tracking.uri=https://host")


def test_a_job_is_named_in_plain_characters_and_by_its_command():
    assert job(name=f"a b/{NAME}").safe_name.isascii()
    digests = {job(**changes).digest for changes in ({}, {"words": ("run",)}, {"tasks": 2}, {"first_seed": 3})}
    assert len(digests) == 4
    assert job(gpus=3).digest == job().digest
