"""The JSON Schemas of recipes and experiments, for editors; of recipes from the plugins that are
registered.
"""

from typing import Any

from runner.plugin.config import Config
from runner.plugin.optimizer import kinds, settings_of
from runner.plugin.registry import Registry, Section
from runner.recipe.recipe import (
    Head,
    ServeConfig,
    SystemConfig,
    TrackingConfig,
    TrainConfig,
)
from runner.recipe.validation import face_of

Json = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SWITCH: Json = {"enum": ["on", "off", True, False]}
# "60_000": a number for the runner, text for an editor that reads plain YAML 1.2.
_GROUPED_DIGITS = r"^[-+]?[0-9.]+(_[0-9.]+)+([eE][-+]?[0-9]+)?$"
_EXTENDS = (
    "The recipe below this one: a path relative to this file, or the name of one that ships; "
    "or a list of them, the lowest first."
)
# Keywords that hold values, not schemas.
_VALUES = ("const", "default", "enum", "examples")


def schema(catalog: Registry) -> Json:
    """JSON Schema (draft 2020-12) of a recipe.

    Nothing is required, because a recipe may leave anything to the one that it extends; for the
    same reason alternatives are ``anyOf``: a section without its ``kind`` fits several of them. A
    plugin that cannot be imported accepts any settings.
    """
    definitions: Json = {}
    head: Json = _model(Head, "recipe", {})["properties"]
    properties = {
        **{name: head[name] for name in ("name", "seed", "device")},
        "extends": {
            "description": _EXTENDS,
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ],
        },
        "model": _section("model", "The learner.", catalog, definitions),
        "data": _section("data", "Where batches come from.", catalog, definitions),
        "optimizer": _optimizer(catalog, definitions),
        "lr_scheduler": _section(
            "lr_scheduler",
            "Schedule of the learning rates; constant by default.",
            catalog,
            definitions,
        ),
        "train": _model(TrainConfig, "train", definitions),
        "optimization": {
            **_stages("optimization", catalog, definitions),
            "description": "Speed-ups and memory savings: each on, off, or on with settings.",
        },
        "inference": {
            **_stages("inference", catalog, definitions),
            "description": "Stages that make a trained model faster or smaller: "
            "each is on, off, or has settings.",
        },
        "callbacks": {
            **_stages("callbacks", catalog, definitions),
            "description": "Code that observes the training: each is on, off, or has settings.",
        },
        "tracking": _model(TrackingConfig, "tracking", definitions),
        "system": _model(SystemConfig, "system", definitions),
        "serve": _model(ServeConfig, "serve", definitions),
    }
    document = {
        "$schema": DIALECT,
        "title": "Recipe",
        **_closed(properties),
        "$defs": definitions,
    }
    return dict(_loosened(document))


def experiment_schema(model: type[Config], title: str) -> Json:
    """JSON Schema (draft 2020-12) of the files that a model of an experiment describes."""
    definitions: Json = {}
    document = {
        "$schema": DIALECT,
        **_model(model, title, definitions),
        "title": title,
        "$defs": definitions,
    }
    return dict(_loosened(document, whole=True))


def _section(
    section: Section, description: str, catalog: Registry, definitions: Json
) -> Json:
    forms = []
    for kind in catalog.kinds(section):
        form = _plugin(section, kind, catalog, definitions)
        properties = {"kind": {"const": kind}, **form.get("properties", {})}
        forms.append({**form, "properties": properties})
    return {"description": description, "anyOf": forms}


def _stages(section: Section, catalog: Registry, definitions: Json) -> Json:
    return _closed(
        {
            kind: _stage(section, kind, catalog, definitions)
            for kind in catalog.kinds(section)
        }
    )


def _stage(section: Section, kind: str, catalog: Registry, definitions: Json) -> Json:
    settings = _plugin(section, kind, catalog, definitions)
    description = settings.pop("description", "")
    if settings.get("properties") == {}:
        return {"description": description, **_SWITCH}
    return {
        "description": description,
        "anyOf": [_SWITCH, {**settings, "minProperties": 1}],
    }


def _plugin(section: Section, kind: str, catalog: Registry, definitions: Json) -> Json:
    face = face_of(catalog, section, kind)
    return (
        _model(face, f"{section}.{kind}", definitions) if face else {"type": "object"}
    )


def _optimizer(catalog: Registry, definitions: Json) -> Json:
    """Returns the schema of one optimizer for all roles, or of one optimizer per
    role of any learner.
    """
    forms = []
    for kind in kinds():
        model = _model(settings_of(kind), f"optimizer.{kind}", definitions)
        settings = model["properties"]
        # The default null means that there is none.
        for name in ("max_grad_norm", "layer_decay"):
            del settings[name]["default"]
        for setting in settings.values():
            setting.pop("title", None)
        settings["groups"] = _groups(settings["groups"], definitions)
        forms.append(_closed({"kind": {"const": kind}, **settings}))
    definitions["optimizer"] = {"anyOf": forms}

    reference: Json = {"$ref": "#/$defs/optimizer"}
    faces = (face_of(catalog, "model", kind) for kind in catalog.kinds("model"))
    roles = sorted({role for face in faces if face for role in face.roles})
    description = (
        "One optimizer of torch.optim for all roles of the learner, or one per role; "
        "default: the learner's."
    )
    by_role = {
        role: {**reference, "description": f"The optimizer of the role {role}."}
        for role in roles
    }
    return {"description": description, "anyOf": [reference, _closed(by_role)]}


def _groups(groups: Json, definitions: Json) -> Json:
    """Returns the schema of parameter groups: a mapping, or the list of mappings of a lock."""
    reference = groups["additionalProperties"]
    name = reference["$ref"].rpartition("/")[2]
    for setting in definitions[name]["properties"].values():
        # A setting that is left out is the optimizer's.
        setting.pop("default", None)
        setting.pop("title", None)
    mapping = {"type": "object", "additionalProperties": reference}
    return {
        "description": groups["description"],
        "anyOf": [mapping, {"type": "array", "items": mapping}],
    }


def _closed(properties: Json) -> Json:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _model(model: type[Config], name: str, definitions: Json) -> Json:
    """Returns the schema of a model; the models inside it move to ``definitions``."""
    model_schema = model.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
    inner_models = model_schema.pop("$defs", {})
    definitions.update(
        {f"{name}.{inner_name}": inner for inner_name, inner in inner_models.items()}
    )
    return model_schema


def _loosened(schema: Any, whole: bool = False) -> Any:
    """Accepts grouped digits and, if the files can extend others, missing required keys."""
    if isinstance(schema, list):
        return [_loosened(item, whole) for item in schema]
    if not isinstance(schema, dict):
        return schema
    loose = {}
    for key, value in schema.items():
        loose[key] = value if key in _VALUES else _loosened(value, whole)
    if isinstance(loose.get("required"), list) and not whole:
        del loose["required"]
    if isinstance(loose.get("oneOf"), list):
        # A section without its kind fits several alternatives.
        loose["anyOf"] = loose.pop("oneOf")
        loose.pop("discriminator", None)
    if loose.get("type") in ("integer", "number"):
        loose["type"] = [loose["type"], "string"]
        loose["pattern"] = _GROUPED_DIGITS
    return loose
