"""The list of plugins has a complete sentence for each."""

import inspect

import pytest

from runner.cli.plugins import first_sentence, plugins
from runner.plugin.registry import SECTIONS, Registry

REGISTRY = Registry(())
PLUGINS = [(section, kind) for section in SECTIONS for kind in REGISTRY.kinds(section)]


def test_the_summary_of_every_plugin_is_a_complete_sentence():
    assert len(PLUGINS) > 50
    for section, kind in PLUGINS:
        card = inspect.getdoc(REGISTRY.get(section, kind))
        summary = first_sentence(card)
        assert summary.endswith("."), (section, kind)
        assert summary.count("(") == summary.count(")"), (section, kind)
        assert " ".join(card.split()).startswith(summary)


@pytest.mark.parametrize(
    ("card", "summary"),
    [
        ("One line.", "One line."),
        ("A network (Kipf and\nWelling 2017). It learns.\n\nMore.", "A network (Kipf and Welling 2017)."),
        ("Numbers (Sohn et al. 2015). ``x`` is one.", "Numbers (Sohn et al. 2015)."),
        ("", ""),
    ],
)
def test_a_sentence_ends_with_its_period_and_not_with_its_line(card, summary):
    assert first_sentence(card) == summary


def test_the_list_and_the_cards_have_no_marks_of_code_and_no_broken_promise(capsys):
    plugins()
    plugins("amp")
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "``" in line]
    promises = [line for line in lines if line.startswith("promise: ")]
    assert promises
    assert all(line.endswith(".") for line in promises)
