"""Jobs for Kubernetes: valid by its published schema, and with the words of the command."""

import shlex

import kubernetes_validate
import pytest
import yaml
from clusters import job
from hostile import NAME
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.distributed.kubernetes import parse_secret, render_manifest
from runner.system.errors import UsageError

VERSIONS = ("1.29", "1.35")
"""The first has all that a Job needs here without feature gates; the last is a recent one."""
WORDS = ("run", "$(HOME)", "$$", "$(touch owned)", "a 'b'", "\n", "yes", "1e3", NAME)


def manifest_of(changed, secrets=()):
    """Returns a Job as Kubernetes reads it, with YAML 1.1, after the check of its schema."""
    manifest = yaml.safe_load(render_manifest(changed, "image:1", "claim", dict(secrets)))
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)
    return manifest


def container_of(manifest):
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    return container


def expanded(words):
    """Returns the words after the replacement by Kubernetes, in which there is no reference."""
    return [word.replace("$$", "$") for word in words]


def test_the_schema_refuses_what_is_wrong():
    manifest = manifest_of(job())
    manifest["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)


numbers = st.integers(1, 100)


@settings(max_examples=25, deadline=None)
@given(
    name=st.text(min_size=1), tasks=numbers, is_array=st.booleans(), cpus=st.none() | numbers, gpus=st.integers(0, 8),
    memory=st.none() | st.integers(1, 2**50), seed=st.none() | st.integers(0, 2**40), secret=st.booleans(),
)  # fmt: skip
def test_every_job_is_valid(name, tasks, is_array, cpus, gpus, memory, seed, secret):
    changed = job(
        name=name, tasks=tasks if is_array else 1, is_array=is_array, cpus=cpus, gpus=gpus, memory=memory,
        first_seed=seed if is_array else None, variables={"MLFLOW_TRACKING_URI": "http://$(x)"},
    )  # fmt: skip
    secrets = {"OPTUNA_STORAGE": ("studies", "url")} if secret else {}
    manifest = manifest_of(changed, secrets)
    assert len(manifest["metadata"]["name"]) <= 52


def test_a_single_task_gets_its_words_without_a_shell():
    container = container_of(manifest_of(job(words=WORDS)))
    assert expanded(container["command"]) == ["runner", *WORDS]
    assert "$(" not in "".join(container["command"]).replace("$$", "")


def test_a_task_of_an_array_computes_its_seed():
    manifest = manifest_of(job(words=WORDS, is_array=True, tasks=3, first_seed=7))
    shell, option, line = expanded(container_of(manifest)["command"])
    assert (shell, option) == ("sh", "-c")
    command, _, seed = line.rpartition(" seed=")
    assert shlex.split(command) == ["exec", "runner", *WORDS]
    assert seed == "$((7 + JOB_COMPLETION_INDEX))"


@pytest.mark.parametrize(("is_array", "action"), [(False, "FailJob"), (True, "FailIndex")])
def test_preemptions_are_no_failures_and_some_failures_are_final(is_array, action):
    spec = manifest_of(job(is_array=is_array, tasks=2 if is_array else 1))["spec"]
    drained, stopped, final = spec["podFailurePolicy"]["rules"]
    assert (drained["action"], drained["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (stopped["action"], stopped["onExitCodes"]["values"]) == ("Ignore", [75])
    assert (final["action"], final["onExitCodes"]["values"]) == (action, [2, 3, 6, 7])
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 120
    # Only an Indexed job may count failures by index.
    assert ("backoffLimitPerIndex" in spec) == (spec["completionMode"] == "Indexed") == is_array


def test_secrets_are_references_and_the_rest_are_values():
    entries = container_of(
        manifest_of(
            job(variables={"MLFLOW_TRACKING_URI": "http://$(x)"}, secrets=("OPTUNA_STORAGE",)),
            {"OPTUNA_STORAGE": ("studies", "url")},
        )
    )["env"]
    identity = {entry["name"]: entry for entry in entries[3:]}
    assert identity.keys() == {"RUNNER_CONTROLLER", "RUNNER_INDEX", "RUNNER_JOB", "RUNNER_ATTEMPT"}
    assert identity["RUNNER_JOB"]["value"] == "kubernetes-$(RUNNER_CONTROLLER)-$(RUNNER_INDEX)"
    assert identity["RUNNER_ATTEMPT"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert entries[:3] == [
        {"name": "RUNNER_WORKSPACE", "value": "/workspace"},
        {"name": "MLFLOW_TRACKING_URI", "value": "http://$$(x)"},
        {"name": "OPTUNA_STORAGE", "valueFrom": {"secretKeyRef": {"name": "studies", "key": "url"}}},
    ]
    with pytest.raises(UsageError, match="--secret OPTUNA_STORAGE=SECRET:KEY"):
        manifest_of(job(secrets=("OPTUNA_STORAGE",)))


def test_names_are_checked_and_a_secret_is_not_repeated():
    assert parse_secret("A_B=studies:url.x") == ("A_B", ("studies", "url.x"))
    for text in ("A=hunter2hunter2", "A=b", "A=B:c", "1=b:c", "A=b:c d", "=b:c", ""):
        with pytest.raises(UsageError, match="VARIABLE=SECRET:KEY") as refused:
            parse_secret(text)
        assert "hunter2" not in str(refused.value)
    for image, claim in (("", "a"), ("a b", "a"), ("a", "A"), ("a", "a\n"), ("a\n", "a")):
        with pytest.raises(UsageError, match=r"--(image|claim): "):
            render_manifest(job(), image, claim, {})
    with pytest.raises(UsageError, match="UTF-8"):
        render_manifest(job(words=("\udce9",)), "a", "b", {})
