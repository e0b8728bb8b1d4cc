"""The command ``schema``: prints JSON Schemas."""

from enum import StrEnum
from typing import Annotated

from typer import Argument

from runner.cli.common import Plugins, emit, registry_of
from runner.system.stored_json import json_text


class FileSort(StrEnum):
    """Type of a YAML file that the runner reads."""

    recipe = "recipe"
    study = "study"
    ablation = "ablation"


SchemaOf = Annotated[FileSort, Argument(help="Kind of file.")]


def schema(of: SchemaOf = FileSort.recipe, plugin: Plugins = None) -> None:
    """Print the JSON Schema of recipes, with all registered plugins, or of ablation or study files.

    [bold]runner schema > recipe.schema.json[/]

    [bold]runner schema study > study.schema.json[/]
    """
    from runner.recipe.schema import experiment_schema
    from runner.recipe.schema import schema as recipe_schema

    # Each branch imports only the class that it describes.
    if of is FileSort.recipe:
        document = recipe_schema(registry_of(plugin))
    elif of is FileSort.study:
        from runner.study.config import StudyConfig

        document = experiment_schema(StudyConfig, "Study")
    else:
        from runner.ablation.experiment import AblationConfig

        document = experiment_schema(AblationConfig, "Ablation")
    emit(json_text(document, indent=2, ensure_ascii=False))
