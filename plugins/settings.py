"""Sorts of settings that learners of several families have."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo

Count = Annotated[int, Field(ge=1)]


def _divides_the_width(heads: int, info: ValidationInfo) -> int:
    width = info.data.get("width", heads)
    if width % heads:
        raise ValueError(f"should divide the width of {width}")
    return heads


Heads = Annotated[Count, AfterValidator(_divides_the_width)]
"""Attention heads, which share among them a ``width`` that is declared before them."""
