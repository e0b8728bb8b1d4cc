"""The JSON Schema of recipes, for editors, from the plugins that are registered."""

from typing import Any

from runner.plugin.config import Config
from runner.plugin.optimizer import SPARED, kinds, signature
from runner.recipe.catalog import Catalog, Section
from runner.recipe.fill import SCHEDULES, face_of
from runner.recipe.sections import Head, TrackingConfig, TrainConfig

Json = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SWITCH: Json = {"enum": ["on", "off", True, False]}
_GROUPED_DIGITS = r"^[-+]?[0-9.]+(_[0-9.]+)+([eE][-+]?[0-9]+)?$"
"""``60_000``: a number for the runner, text for an editor that reads plain YAML 1.2."""
_VALUES = ("const", "default", "enum", "examples")
"""Keywords that hold values, not schemas."""


def schema(catalog: Catalog) -> Json:
    """JSON Schema (draft 2020-12) of a recipe.

    Nothing is required, because a recipe may leave anything to the one that it extends; for the same reason
    alternatives are ``anyOf``: a section without its ``kind`` fits several of them.

    Args:
        catalog: the plugins that a recipe may name; one that cannot be imported accepts any settings.
    """
    definitions: Json = {}
    head: Json = _model(Head, "recipe", definitions)["properties"]
    properties = head | {
        "extends": {
            "type": "string",
            "description": "The recipe below this one: a path relative to this file, or the name of one that ships.",
        },
        "model": _section("model", "What learns.", catalog, definitions),
        "data": _section("data", "Where batches come from.", catalog, definitions),
        "optimizer": _optimizer(catalog, definitions),
        "lr_scheduler": {
            "description": "How learning rates move; constant unless told.",
            "anyOf": [_model(model, f"lr_scheduler.{kind}", definitions) for kind, model in SCHEDULES.items()],
        },
        "train": _model(TrainConfig, "train", definitions),
        "optimization": {
            "type": "object",
            "description": "Speed-ups and memory savings: each on, off, or on with settings.",
            "properties": {kind: _stage(kind, catalog, definitions) for kind in catalog.kinds("optimization")},
            "additionalProperties": False,
        },
        "tracking": _model(TrackingConfig, "tracking", definitions),
    }
    document: Json = {"$schema": DIALECT, "title": "Recipe", "type": "object", "properties": properties}
    document |= {"additionalProperties": False, "$defs": definitions}
    loosened: Json = _loosened(document)
    return loosened


def _section(section: Section, description: str, catalog: Catalog, definitions: Json) -> Json:
    forms = []
    for kind in catalog.kinds(section):
        face = face_of(catalog, section, kind)
        form: Json = _model(face, f"{section}.{kind}", definitions) if face else {"type": "object"}
        forms.append({**form, "properties": {"kind": {"const": kind}, **form.get("properties", {})}})
    return {"description": description, "anyOf": forms}


def _optimizer(catalog: Catalog, definitions: Json) -> Json:
    """One optimizer for all roles, or one for each role of whatever learner."""
    common: Json = {
        "max_grad_norm": {
            "description": "To which gradients are clipped; null leaves them as they are.",
            "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}],
        },
        "spare": {
            "description": "What weight decay leaves alone.",
            "type": "array",
            "items": {"enum": list(SPARED)},
            "default": list(SPARED),
        },
    }
    forms = []
    for kind in kinds():
        settings = {name: argument.schema() for name, argument in signature(kind).items()}
        properties = {"kind": {"const": kind}, **settings, **common}
        forms.append({"type": "object", "properties": properties, "additionalProperties": False})
    definitions["optimizer"] = {"anyOf": forms}
    one: Json = {"$ref": "#/$defs/optimizer"}
    faces = (face_of(catalog, "model", kind) for kind in catalog.kinds("model"))
    roles = sorted({role for face in faces if face for role in face.roles})
    by_role: Json = {"type": "object", "properties": dict.fromkeys(roles, one), "additionalProperties": False}
    description = "One of torch.optim for all roles of the learner, or one for each; left out, the learner's own."
    return {"description": description, "anyOf": [one, by_role]}


def _stage(kind: str, catalog: Catalog, definitions: Json) -> Json:
    face = face_of(catalog, "optimization", kind)
    settings = _model(face, f"optimization.{kind}", definitions) if face else {"type": "object"}
    if face and not settings["properties"]:
        return {"description": settings.get("description", ""), **_SWITCH}
    description = settings.pop("description", "")
    return {"description": description, "anyOf": [_SWITCH, {**settings, "minProperties": 1}]}


def _model(model: type[Config], name: str, definitions: Json) -> Json:
    """The schema of a model, with the models inside it moved to ``definitions`` under names of their own."""
    found = model.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
    definitions.update({f"{name}.{inner}": each for inner, each in found.pop("$defs", {}).items()})
    return found


def _loosened(schema: Any) -> Any:
    """Accepts parts of a recipe, and digits in groups."""
    if isinstance(schema, list):
        return [_loosened(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    loose = {key: value if key in _VALUES else _loosened(value) for key, value in schema.items()}
    if isinstance(loose.get("required"), list):
        del loose["required"]
    if isinstance(loose.get("oneOf"), list):
        loose["anyOf"] = loose.pop("oneOf")
        loose.pop("discriminator", None)
    if loose.get("type") in ("integer", "number"):
        loose |= {"type": [loose["type"], "string"], "pattern": _GROUPED_DIGITS}
    return loose
