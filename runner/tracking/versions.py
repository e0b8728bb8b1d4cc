"""Versions of models, as MLflow's registry keeps them: ``NAME/3``, or ``NAME@champion``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.system.errors import UsageError
from runner.system.secrets import REFUSED_NAME, has_secret
from runner.tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
"""The alias of the version that is to be used."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REFERENCE = re.compile(rf"({_NAME})(?:/([1-9][0-9]*)|@({_NAME}))")
_TAG = "runner."
"""Prefix of the runner's tags."""


@dataclass(frozen=True)
class Judgement:
    """The result of ``runner verify`` for a model."""

    outcome: str
    """PASS, FAIL or INCONCLUSIVE."""
    recipe: str
    """Whose stages were judged."""
    recipe_digest: str
    stages: dict[str, Any]
    """The recipe's section ``inference``."""
    weights: str
    """SHA-256 of the weights that answered."""
    summary: str = ""
    """Summary of the stages that did not pass."""


@dataclass(frozen=True)
class Version:
    """A version of a model."""

    name: str
    number: int
    run: str
    """The name of the run that has trained it."""
    weights: str
    """SHA-256 of its weights."""
    aliases: tuple[str, ...]
    created: float
    """Seconds since 1970."""
    model: str
    """MLflow's id of the logged model: ``m-...``."""
    judgement: Judgement | None
    """The newest, if there is any."""

    @property
    def reference(self) -> str:
        """Returns the reference that commands accept."""
        return f"{self.name}/{self.number}"

    def data(self) -> dict[str, Any]:
        """Returns the fields as a JSON object."""
        return {"reference": self.reference, **asdict(self)}


def is_version(reference: str) -> bool:
    """Returns whether a reference has the form of a version; an existing path is not a version."""
    return _REFERENCE.fullmatch(reference) is not None and not Path(reference).exists()


class Versions:
    """The registry of a store that has answered; a ``StorageError`` where MLflow refuses."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._client = store.client

    def all(self, name: str | None = None) -> list[Version]:
        """Versions of one model or of all, by name and number."""
        condition = "" if name is None else f"name = '{_checked(name)}'"
        versions: list[Version] = []
        token: str | None = None
        with self._store.telling("list versions of models"):
            while token != "":
                page = self._client.search_model_versions(condition, page_token=token)
                for summary in page:
                    # The search leaves the aliases out.
                    model_version = self._client.get_model_version(summary.name, str(summary.version))
                    if f"{_TAG}weights" in model_version.tags:
                        versions.append(_version(model_version))
                token = page.token or ""
        return sorted(versions, key=lambda version: (version.name, version.number))

    def one(self, reference: str) -> Version:
        """The version of that name; a ``UsageError`` if there is none."""
        from mlflow.exceptions import MlflowException

        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise UsageError(f"'{reference}' is not a version of a model; should be NAME/NUMBER or NAME@ALIAS")
        name, number, alias = match.groups()
        with self._store.telling(f"look for {reference}"):
            try:
                if alias is not None:
                    number = str(self._client.get_model_version_by_alias(name, alias).version)
                model_version = self._client.get_model_version(name, number)
            except MlflowException as error:
                if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    raise
                model_version = None
        # Versions without the tag were registered by another program.
        if model_version is not None and f"{_TAG}weights" in model_version.tags:
            return _version(model_version)

        labels = [" @".join((version.reference, *version.aliases)) for version in self.all()]
        hint = "register one with: runner models register RUN"
        if labels:
            hint = f"there are: {', '.join(labels)}"
        raise UsageError(f"unknown version '{reference}'; {hint}")

    def create(
        self,
        name: str,
        run_id: str,
        facts: Mapping[str, str],
        location: str,
        description: str = "",
    ) -> Version:
        """Adds a version, and its model if that is new.

        Args:
            name: of the model.
            run_id: MLflow's id of the run that has trained it.
            facts: ``run``, ``weights`` and ``model``, as a ``Version`` has them.
            location: where its files are, as MLflow has logged them.
            description: in Markdown, for MLflow's page of the version.
        """
        from mlflow.exceptions import MlflowException

        tags = {f"{_TAG}{key}": value for key, value in facts.items()}
        name = _checked(name)
        with self._store.telling(f"register '{name}'"):
            try:
                self._client.create_registered_model(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            created = self._client.create_model_version(
                name,
                location,
                run_id,
                tags,
                description=description,
                model_id=facts["model"],
            )
            return _version(created)

    def judge(self, version: Version, judgement: Judgement) -> Version:
        """Records a verdict on a version, in place of an earlier one."""
        text = json.dumps(asdict(judgement))
        with self._store.telling(f"write to {version.reference}"):
            self._client.set_model_version_tag(version.name, str(version.number), f"{_TAG}judgement", text)
        return replace(version, judgement=judgement)

    def call(self, version: Version, alias: str) -> Version:
        """Gives a version an alias, which another one may have had."""
        with self._store.telling(f"promote {version.reference}"):
            self._client.set_registered_model_alias(version.name, alias, str(version.number))
        return self.one(version.reference)


def _checked(name: str) -> str:
    if has_secret(name):
        raise UsageError(f"the name of the model {REFUSED_NAME}")
    if re.fullmatch(_NAME, name) is None:
        raise UsageError(f"'{name}' is not a valid name of a model; use letters, digits, '.', '_' and '-'")
    return name


def _version(model_version: ModelVersion) -> Version:
    tags = {key.removeprefix(_TAG): value for key, value in model_version.tags.items()}
    judgement = None
    if "judgement" in tags:
        judgement = Judgement(**json.loads(tags["judgement"]))
    return Version(
        name=model_version.name,
        number=int(model_version.version),
        run=tags["run"],
        weights=tags["weights"],
        aliases=tuple(sorted(model_version.aliases)),
        created=model_version.creation_timestamp / 1e3,
        model=tags["model"],
        judgement=judgement,
    )
