import pytest
from pydantic import Field, ValidationError

from runner.plugin.config import Config


class Inner(Config):
    depth: int = 1
    width: float = 2.0


class Outer(Config):
    name: str = "x"
    inner: Inner = Field(default_factory=Inner)


def test_what_nobody_read_is_known_down_to_the_leaf():
    config = Outer()
    assert config.unread("model.") == ["model.name", "model.inner.depth", "model.inner.width"]
    assert config.name == "x"
    assert config.inner.depth == 1
    assert config.unread("model.") == ["model.inner.width"]


def test_printing_or_dumping_a_config_does_not_count_as_reading_it():
    config = Outer()
    repr(config), config.model_dump(), config.model_dump_json()
    assert config.unread() == ["name", "inner.depth", "inner.width"]


@pytest.mark.parametrize(
    "values",
    [
        {"nam": "x"},
        {"name": 1},
        {"inner": {"depth": "1"}},
        {"inner": {"width": float("inf")}},
        {"inner": {"depth": True}},
    ],
)
def test_unknown_keys_other_types_and_infinities_are_errors(values):
    with pytest.raises(ValidationError):
        Outer.model_validate(values)


def test_a_config_does_not_change():
    with pytest.raises(ValidationError):
        Outer().name = "y"
