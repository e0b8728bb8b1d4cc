"""Writes plain values as YAML."""

from typing import Any

import yaml

from runner.recipe.scalars import resolve
from runner.recipe.yaml_nodes import TAG
from runner.system.escapes import is_printable

# No line is broken.
_WIDTH = 2**31 - 1


class _Dumper(yaml.CSafeDumper):
    """Quotes text that ``resolve`` would read back as something else, and nothing more."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            resolved = resolve(value)
            return TAG + ("null" if resolved is None else type(resolved).__name__)
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

    def represent_str(self, data: str) -> Any:
        # These two words mean something to YAML. What is printed escaped reads back in double
        # quotes only.
        needs_quotes = data in ("<<", "=") or not is_printable(data)
        return self.represent_scalar(
            f"{TAG}str", data, style='"' if needs_quotes else None
        )

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_str)


def dump(values: Any) -> str:
    """Plain values as a YAML document that reads back as the same values."""
    return yaml.dump(
        values,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=_WIDTH,
    )


def is_same(left: Any, right: Any) -> bool:
    """Returns whether two plain values are equal; NaN is equal to NaN, also in lists."""
    return bool(left == right) or dump_inline(left) == dump_inline(right)


def dump_inline(value: Any) -> str:
    """A plain value as YAML on one line."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=True,
        width=_WIDTH,
    )
    # A scalar alone is followed by a document end marker.
    return text.removesuffix("\n").removesuffix("\n...")
