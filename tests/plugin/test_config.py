import pytest
from pydantic import Field, ValidationError

from runner.plugin.config import Config


class Inner(Config):
    depth: int = 1
    width: float = 2.0


class Outer(Config):
    name: str = "x"
    inner: Inner = Field(default_factory=Inner)

    @property
    def label(self) -> str:
        return self.name.upper()


def test_what_nobody_read_is_known_down_to_the_leaf():
    config = Outer().recorded()
    assert config.unread("model.") == ["model.name", "model.inner.depth", "model.inner.width"]
    assert config.name == "x"
    assert config.inner.depth == 1
    assert config.unread("model.") == ["model.inner.width"]


def test_what_a_property_reads_is_read():
    config = Outer().recorded()
    assert config.label == "X"
    assert config.unread() == ["inner.depth", "inner.width"]


def test_a_section_that_is_taken_but_not_looked_into_is_not_read():
    config = Outer().recorded()
    assert config.inner
    assert config.unread() == ["name", "inner.depth", "inner.width"]


@pytest.mark.parametrize(
    "take",
    [
        dict,
        list,
        lambda config: config.model_dump(),
        lambda config: config.model_dump(mode="json"),
        lambda config: config.model_dump_json(),
        lambda config: config.model_copy(),
        lambda config: config.model_copy(update={"name": "y"}),
        lambda config: (config.name, dict(config.inner)),
        lambda config: (config.name, config.inner.model_dump()),
    ],
)
def test_taking_the_fields_together_counts_as_reading_all_of_them(take):
    config = Outer().recorded()
    take(config)
    taken = config.inner.unread()
    assert config.unread("") == [f"inner.{name}" for name in taken]
    assert "name" not in config.unread()


@pytest.mark.parametrize("take", [lambda config: config.model_dump(), lambda config: config.model_copy()])
def test_a_dump_or_a_copy_takes_what_is_inside_too(take):
    config = Outer().recorded()
    take(config)
    assert config.unread() == []


@pytest.mark.parametrize("look", [repr, str, hash, lambda config: config == Outer(), lambda config: config.unread()])
def test_looking_at_a_config_does_not_count_as_reading_it(look):
    config = Outer().recorded()
    try:
        look(config)
    except TypeError:
        assert look is hash
    assert config.unread() == ["name", "inner.depth", "inner.width"]


def test_without_a_record_nothing_is_marked_and_nothing_is_unread():
    config = Outer()
    assert config.name == "x"
    assert config.unread() == []
    assert config.recorded().unread() == ["name", "inner.depth", "inner.width"]


def test_records_are_apart():
    config = Outer()
    first, second = config.recorded(), config.recorded()
    assert first.inner.depth == second.name.count("x") == 1
    assert first.unread() == ["name", "inner.width"]
    assert second.unread() == ["inner.depth", "inner.width"]
    assert config.unread() == []


def test_a_recorded_copy_says_the_same():
    config = Outer(name="y", inner=Inner(depth=3))
    assert config.recorded().model_dump() == config.model_dump()


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
