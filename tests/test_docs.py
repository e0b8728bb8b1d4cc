"""What README, CONTRIBUTING and docs speak of exists, and is what they say it is."""

import json
import re
import runpy
import shutil
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from running import forked, result_of

from runner.ablation.experiment import AblationConfig, load_experiment
from runner.cli import app
from runner.plugin.registry import Registry
from runner.system.errors import ExitCode

ROOT = Path(__file__).parents[1]
README, CONTRIBUTING, CHANGELOG = (ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG"))
DOCS = {page.stem: page for page in sorted((ROOT / "docs").glob("*.md"))}
EXPERIMENTS = ROOT / "experiments" / "README.md"
PAGES = pytest.mark.parametrize(
    "page", [README, CONTRIBUTING, CHANGELOG, EXPERIMENTS, *DOCS.values()], ids=lambda page: str(page.relative_to(ROOT))
)
VERBS = {command.name or command.callback.__name__ for command in app.registered_commands}
VERBS |= {group.name for group in app.registered_groups}


def code(page):
    """Code blocks and inline code of a page, in one text."""
    blocks = r"^ *```.*?```$|`[^`\n]+`|^    \S.*$"
    return "\n".join(re.findall(blocks, page.read_text(), re.DOTALL | re.MULTILINE))


def blocks(page, language):
    """Code blocks of one language, without the indentation of a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(f"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


@PAGES
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [target for target in targets if ":" not in target and not (page.parent / target).exists()] == []


def test_every_image_has_a_description():
    pages = [README, *DOCS.values(), *(ROOT / "experiments").glob("*/*.md")]
    images = [image for page in pages for image in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text())]
    assert len(images) > 40
    assert [target for text, target in images if len(text.split()) < 2 or text == Path(target).name] == []


@PAGES
def test_files_that_are_named_exist(page):
    named = re.findall(r"(?<![\w./-])((?:recipes|runner|plugins|tests|docs|experiments|\.ci)/[\w./-]*)", code(page))
    assert [name for name in named if not (ROOT / name).exists()] == []


@PAGES
def test_verbs_that_are_named_exist(page):
    assert set(re.findall(r"(?:\$ |`|/bin/)runner ([a-z]+)", code(page))) - VERBS == set()


@pytest.mark.parametrize(("page", "section"), [("stages", "optimization"), ("inference", "inference")])
def test_every_stage_is_listed_with_its_phase_and_contract(page, section):
    listed = re.findall(r"^\| `(\w+)` \| (\d) \| ([^|]+) \|", DOCS[page].read_text(), re.MULTILINE)
    cards = result_of(forked("plugins", "--json"))["plugins"]
    stages = [card for card in cards if card["section"] == section and card["provider"].startswith("proven-runner ")]
    assert sorted(listed) == [(card["kind"], str(card["phase"]), " or ".join(card["contract"])) for card in stages]


def test_every_exit_code_is_named():
    section = DOCS["commands"].read_text().partition("| exit code |")[2].partition("##")[0]
    assert {int(number) for number in re.findall(r"\d+", section)} == {int(code) for code in ExitCode}


def test_recipes_that_are_shown_are_parts_of_those_that_ship():
    recipes = [path.read_text() for path in (ROOT / "recipes").glob("*.yaml")]
    shown = [block for block in blocks(DOCS["recipes"], "yaml") if not block.startswith("name: mine")]
    assert len(shown) == 2
    assert [block for block in shown if not any(block in recipe for recipe in recipes)] == []


def test_the_simulator_that_is_shown_is_part_of_the_example():
    shown = [block for block in blocks(DOCS["simulator"], "python") if block.startswith(" ")]
    assert len(shown) == 1
    assert shown[0] in (ROOT / "docs" / "example_simulator.py").read_text()


def test_every_page_stands_in_the_site():
    places = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {"README.md", *(f"docs/{page.name}" for page in DOCS.values())} <= set(places)
    assert [place for place in places if not (ROOT / place).is_file()] == []


def test_the_errors_that_are_shown_are_what_validate_says(tmp_path, monkeypatch):
    (mine,) = (block for block in blocks(DOCS["recipes"], "yaml") if block.startswith("name: mine"))
    (session,) = (block for block in blocks(DOCS["recipes"], "console") if "validate" in block)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(mine)
    command, _, said = session.partition("\n")
    assert command == "$ runner validate mine.yaml"
    assert forked("validate", "mine.yaml").stderr == said


def test_the_walk_through_shows_lines_that_exist():
    places = ("plugins/stages/fused_optimizer.py", "tests/marl/stages/test_close_stages.py", "pyproject.toml")
    texts = [(ROOT / place).read_text() for place in places]
    shown = blocks(CONTRIBUTING, "python") + blocks(CONTRIBUTING, "toml")
    assert len(shown) == 3
    assert [block for block in shown if not any(block.strip() in text for text in texts)] == []


def test_ci_calls_the_test_command_and_every_install_is_constrained():
    lines = [line for page in (README, *DOCS.values()) for line in page.read_text().splitlines()]
    (block,) = (block for block in blocks(README, "bash") if "pytest" in block)
    assert len(blocks(README, "bash")) == 2
    assert blocks(README, "console") == []
    assert "'.[test]'" in block
    assert block.strip() in (ROOT / ".ci" / "run").read_text()
    here = [line for line in lines if "pip install" in line and "-e '" in line]
    assert [line for line in here if "-c constraints.txt" not in line] == []


def test_everything_that_the_test_extra_installs_is_pinned():
    pinned = {canonicalize_name(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().split("\n")}
    needed = set()
    collect("proven-runner", {"", "test"}, needed)
    assert {name for name, _ in needed} - pinned == {"proven-runner"}


def collect(distribution, extras, needed):
    """Adds everything that a distribution needs with these extras."""
    for requirement in map(Requirement, requires(distribution) or ()):
        applies = not requirement.marker or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        found = (canonicalize_name(requirement.name), frozenset({"", *requirement.extras}))
        if applies and found not in needed:
            needed.add(found)
            collect(*found, needed)


def test_cards_tell_what_the_ablations_here_measured():
    generator = runpy.run_path(str(ROOT / "experiments" / "cards.py"))
    assert json.loads(generator["MEASURED"].read_text()) == generator["measured"]()


@pytest.mark.parametrize(("name", "writer"), [
    ("marl_phases", "write_ablation"), ("gcn_cora", "write_ablation"), ("gpt_int8", "write_inference_ablation"),
])  # fmt: skip
def test_reports_follow_from_the_stored_results(tmp_path, monkeypatch, name, writer):
    """By the present rules, whatever the age of the measurement."""
    monkeypatch.setattr("runner.system.plots.draw_png", lambda *arguments: True)
    generator = runpy.run_path(str(ROOT / "experiments" / "reports.py"))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    folder = tmp_path / "experiments" / name
    shutil.copytree(ROOT / "experiments" / name, folder)
    (folder / "README.md").unlink()
    generator[writer](folder)
    for path in sorted(folder.glob("*.md")) + sorted(folder.glob("recommended*.yaml")):
        assert path.read_text() == (ROOT / "experiments" / name / path.name).read_text()


def test_every_experiment_is_in_the_index():
    folders = {path.parent.name for path in (ROOT / "experiments").glob("*/README.md")}
    assert folders == set(re.findall(r"\]\((\w+)/README\.md\)", EXPERIMENTS.read_text()))


def test_the_error_rates_in_the_readme_are_those_of_the_experiment():
    def rows(page):
        return set(re.findall(r"^\| .* \| [\d. /]+ \| [\d. /]+ \|$", page.read_text(), re.MULTILINE))

    report = ROOT / "experiments" / "instrument" / "README.md"
    assert len(rows(README)) == 8
    assert rows(README) == rows(report)


def test_the_ablation_in_the_docs_is_one_and_every_key_is_explained(tmp_path):
    (text,) = blocks(DOCS["ablation"], "yaml")
    (tmp_path / "mine.yaml").write_text(text)
    loaded = load_experiment(tmp_path / "mine.yaml", (), Registry())
    assert [case.name for case in loaded.cases] == ["2 agents", "4 agents"]
    table = DOCS["ablation"].read_text().partition("| key |")[2].partition("##")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(AblationConfig.model_fields)
