"""Jobs for Kubernetes, as YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from runner.distributed.batch_job import GRACE_SECONDS, BatchJob, refuse_secrets
from runner.system.errors import ExitCode, UsageError
from runner.system.processes import ATTEMPT, JOB

WORKSPACE = "/workspace"
"""Where a container has the volume of the claim."""
_CONTAINER = "runner"
_CONTROLLER = "RUNNER_CONTROLLER"
_INDEX = "RUNNER_INDEX"
_RETRIES = 5
_FINAL_CODES = (ExitCode.USAGE, ExitCode.GATE_FAILED, ExitCode.DIVERGED, ExitCode.NO_CHECKPOINT)
"""Exit codes that another attempt has again."""
_LONGEST_NAME = 40
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_KEY = re.compile(r"[A-Za-z0-9._-]{1,253}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")


def render_manifest(job: BatchJob, image: str, claim: str, secrets: Mapping[str, tuple[str, str]]) -> str:
    """Returns the Job of Kubernetes in YAML.

    Args:
        job: The job.
        image: The image, in which ``runner`` is installed.
        claim: The PersistentVolumeClaim whose volume is the workspace.
        secrets: By environment variable, the name of a Secret and the key in it.

    Raises:
        UsageError: A name is not one of Kubernetes, or a secret would be written.
    """
    # Only needed here, and the command line has to start quickly.
    import yaml

    if not _IMAGE.fullmatch(image):
        raise UsageError(f"--image: '{image}' is not the name of an image")
    if not _NAME.fullmatch(claim):
        raise UsageError(f"--claim: '{claim}' is not the name of a PersistentVolumeClaim")
    _refuse_missing(job, secrets)
    # Kubernetes reads YAML 1.1, where more words need quotes than in YAML 1.2.
    text: str = yaml.safe_dump(_job(job, image, claim, secrets), sort_keys=False, width=2**31 - 1)
    refuse_secrets(text)
    return text


def parse_secret(text: str) -> tuple[str, tuple[str, str]]:
    """Returns the variable, the Secret and its key of ``VARIABLE=SECRET:KEY``.

    Raises:
        UsageError: The text has another form; it is not repeated, because it may be the secret.
    """
    variable, _, reference = text.partition("=")
    name, _, key = reference.partition(":")
    if not (_VARIABLE.fullmatch(variable) and _NAME.fullmatch(name) and _KEY.fullmatch(key)):
        raise UsageError("--secret: should be VARIABLE=SECRET:KEY, with the name of a Secret of Kubernetes and its key")
    return variable, (name, key)


def _refuse_missing(job: BatchJob, secrets: Mapping[str, tuple[str, str]]) -> None:
    """Raises a UsageError if a variable with a secret has no reference."""
    for name in job.secrets:
        if name not in secrets:
            raise UsageError(f"{name} contains a password, which is not written; use --secret {name}=SECRET:KEY")


def _job(job: BatchJob, image: str, claim: str, secrets: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    name = _job_name(job)
    template = {
        "metadata": {"labels": {"app.kubernetes.io/name": "runner", "app.kubernetes.io/instance": name}},
        "spec": _pod(job, image, claim, secrets),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completions": job.tasks,
            "parallelism": job.tasks,
            **_failure_rules(job),
            # Two pods of one task would train one run.
            "podReplacementPolicy": "Failed",
            "template": template,
        },
    }


def _failure_rules(job: BatchJob) -> dict[str, Any]:
    """Returns which endings of a pod count as failures, and how many are too many."""
    action = "FailIndex" if job.is_array else "FailJob"
    limit = "backoffLimitPerIndex" if job.is_array else "backoffLimit"
    rules = [
        # A node that is drained sends the signal, too.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _exit_codes(job.retry_code)},
        {"action": action, "onExitCodes": _exit_codes(*_FINAL_CODES)},
    ]
    return {
        "completionMode": "Indexed" if job.is_array else "NonIndexed",
        limit: _RETRIES,
        "podFailurePolicy": {"rules": rules},
    }


def _exit_codes(*codes: int) -> dict[str, Any]:
    return {"containerName": _CONTAINER, "operator": "In", "values": sorted(map(int, codes))}


def _pod(job: BatchJob, image: str, claim: str, secrets: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": image,
        "command": _command(job),
        "env": _environment(job, secrets),
        "volumeMounts": [
            {"name": "workspace", "mountPath": WORKSPACE},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108
        ],
    }
    resources = _resources(job)
    if resources:
        container["resources"] = resources
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "workspace", "persistentVolumeClaim": {"claimName": claim}},
            # Containers have 64 MiB, too little for batches that processes exchange.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _command(job: BatchJob) -> list[str]:
    """Returns the words of the container, in which Kubernetes replaces nothing."""
    words = ["runner", *job.words]
    # A shell computes the seed from the number of the task.
    if job.first_seed is not None:
        seed = f"seed=$(({job.first_seed} + JOB_COMPLETION_INDEX))"
        words = ["sh", "-c", f"exec {shlex.join(words)} {seed}"]
    for word in words:
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise UsageError("the command has bytes that are not text in UTF-8, which Kubernetes does not take")
    return [word.replace("$", "$$") for word in words]


def _environment(job: BatchJob, secrets: Mapping[str, tuple[str, str]]) -> list[dict[str, Any]]:
    variables = {"RUNNER_WORKSPACE": WORKSPACE, **job.variables}
    entries: list[dict[str, Any]] = [
        {"name": name, "value": value.replace("$", "$$")} for name, value in variables.items() if name not in secrets
    ]
    for name, (secret, key) in secrets.items():
        reference = {"secretKeyRef": {"name": secret, "key": key}}
        entries.append({"name": name, "valueFrom": reference})
    return [*entries, *_identity()]


def _identity() -> list[dict[str, Any]]:
    """Returns the variables by which a pod takes its run over from the pod that it replaces."""
    fields = {
        _CONTROLLER: "metadata.labels['batch.kubernetes.io/controller-uid']",
        _INDEX: "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        ATTEMPT: "metadata.name",
    }
    entries: list[dict[str, Any]] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    return [*entries, {"name": JOB, "value": f"kubernetes-$({_CONTROLLER})-$({_INDEX})"}]


def _resources(job: BatchJob) -> dict[str, dict[str, str]]:
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if job.cpus is not None:
        requests["cpu"] = str(job.cpus)
    if job.memory is not None:
        requests["memory"] = limits["memory"] = f"{-(-job.memory // 2**20)}Mi"
    if job.gpus:
        limits["nvidia.com/gpu"] = str(job.gpus)
    sections = {"requests": requests, "limits": limits}
    return {name: section for name, section in sections.items() if section}


def _job_name(job: BatchJob) -> str:
    """Returns a name of Kubernetes that is the same for the same command."""
    text = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    return f"{text or 'job'}-{job.digest}"
