import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from runner.plugin.registry import GROUP, Registry
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import UsageError

FACES = '''
from typing import ClassVar
from runner.api import Exact, LearnerConfig, Setting, SourceConfig, StageConfig

class Net(LearnerConfig):
    """A net."""
    kind: ClassVar[str] = "{prefix}net"
    learns_from: ClassVar[str] = "rows"
    implementation = "Missing"

class Rows(SourceConfig):
    """Rows."""
    kind: ClassVar[str] = "{prefix}rows"
    provides: ClassVar[str] = "rows"
    implementation = "Missing"

class Fast(StageConfig):
    """Fast."""
    kind: ClassVar[str] = "{prefix}fast"
    phase: ClassVar[int] = 1
    def contract(self, setting: Setting) -> Exact: return Exact()
    implementation = "Missing"

class Abstract(StageConfig):
    phase: ClassVar[int] = 1

NOT_A_FACE = 3
'''


def install(folder: Path, name: str, entry_points: dict[str, str], modules: dict[str, str]) -> None:
    """Lays out a distribution as pip would."""
    metadata = folder / f"{name}-1.5.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    lines = [f"[{GROUP}]", *(f"{key} = {value}" for key, value in entry_points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on ``sys.path`` for distributions; its modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield tmp_path / "site"
    for name in [name for name in sys.modules if name.startswith(("acme_", "bolt_"))]:
        del sys.modules[name]


def registry_of(site, *files):
    installed = [
        each for found in distributions(path=[str(site)]) for each in found.entry_points if each.group == GROUP
    ]
    return Registry(files, installed=installed)


def test_plugins_of_a_distribution_are_found_and_imported_when_asked_for(site):
    install(
        site, "acme",
        {"model.net": "acme_faces:Net", "data.rows": "acme_faces:Rows", "optimization.fast": "acme_faces:Fast"},
        {"acme_faces": FACES.format(prefix="")},
    )  # fmt: skip
    registry = registry_of(site)
    assert [registry.kinds(section) for section in ("model", "data", "optimization")] == [["net"], ["rows"], ["fast"]]
    assert "acme_faces" not in sys.modules
    assert registry.get("model", "net").__name__ == "Net"
    assert str(registry.provider("optimization", "fast")) == "acme 1.5"


def test_a_kind_of_two_distributions_names_both(site):
    for name in ("acme", "bolt"):
        install(site, name, {"model.net": f"{name}_faces:Net"}, {})
    with pytest.raises(UsageError, match=r"model.net is registered twice, by (acme|bolt) 1.5 and (acme|bolt) 1.5"):
        registry_of(site)


def test_a_plugin_that_cannot_be_imported_breaks_no_other(site):
    install(
        site, "acme", {"model.net": "acme_faces:Net", "data.rows": "acme_broken:Rows"},
        {"acme_faces": FACES.format(prefix=""), "acme_broken": "import no_such_module"},
    )  # fmt: skip
    registry = registry_of(site)
    assert registry.kinds("data") == ["rows"]
    assert registry.get("model", "net")
    message = "data.rows of acme 1.5 cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    with pytest.raises(UsageError, match=message) as caught:
        registry.get("data", "rows")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("model.net", "NOT_A_FACE", "model.net of acme 1.5 is no LearnerConfig: 3"),
        ("model.rows", "Rows", "is no LearnerConfig"),
        ("model.other", "Net", "model.other of acme 1.5 calls itself kind 'net'"),
        ("optimization.abstract", "Abstract", "is abstract"),
        ("model.net", "Missing", "cannot be imported: AttributeError"),
    ],
)
def test_an_entry_point_that_is_not_what_its_name_says(site, name, target, message):
    install(site, "acme", {name: f"acme_faces:{target}"}, {"acme_faces": FACES.format(prefix="")})
    section, kind = name.split(".")
    with pytest.raises(UsageError, match=message):
        registry_of(site).get(section, kind)


@pytest.mark.parametrize("name", ["net", "tracker.x", "model."])
def test_an_entry_point_of_no_section(site, name):
    install(site, "acme", {name: "acme_faces:Net"}, {})
    with pytest.raises(UsageError, match=r"of acme 1.5 should be one of model.KIND"):
        registry_of(site)


def test_an_unknown_kind_suggests_the_nearest(site):
    install(site, "acme", {"model.network": "acme_faces:Net"}, {})
    with pytest.raises(UsageError, match="unknown kind 'netwrk' in model - did you mean 'network'"):
        registry_of(site).get("model", "netwrk")


def test_a_local_file_registers_every_face_it_defines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(FACES.format(prefix="my_") + "from runner.plugins.marl.config import MasacConfig\n")
    registry = Registry([path], installed=[])
    assert [registry.kinds(section) for section in ("model", "data", "optimization")] == [
        ["my_net"], ["my_rows"], ["my_fast"],
    ]  # fmt: skip
    assert registry.provider("model", "my_net").name == "mine.py"
    assert registry.files == (path,)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: x\nmodel: {kind: my_net}\ndata: {kind: my_rows}\ntrain: {updates: 1}\noptimization: {my_fast: on}"
    )
    assert list(load(recipe, (), registry).stages) == ["my_fast"]
    assert Registry([path], installed=[]).get("model", "my_net") is registry.get("model", "my_net")


def test_a_local_file_may_not_take_the_kind_of_another_plugin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(FACES.format(prefix="").replace('"net"', '"masac"'))
    with pytest.raises(UsageError, match=r"model.masac is registered twice, by proven-runner .* and mine.py"):
        Registry([path])


IMPORTS = ["from {name} import *", "from {name} import Net, Rows, Fast", "import {name}", "import {name} as others"]


@pytest.mark.parametrize("number", range(len(IMPORTS)))
@pytest.mark.parametrize(
    ("section", "mention"), [("model", "kind 'x_net'"), ("data", "kind 'x_rows'"), ("optimization", "stage")]
)
def test_a_kind_that_a_plugin_file_imports_is_refused_with_its_file(number, section, mention, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    beside = tmp_path / f"beside_{section}_{number}.py"
    beside.write_text(FACES.format(prefix="x_"))
    path = tmp_path / "importing.py"
    path.write_text(
        IMPORTS[number].format(name=beside.stem)
        + "\n"
        + re.sub(r"class (?=[NRF])", "class My", FACES.format(prefix="my_"))
    )
    sections = {"model": "{kind: my_net}", "data": "{kind: my_rows}", "optimization": "{my_fast: on}"}
    sections[section] = sections[section].replace("my_", "x_")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: x\ntrain: {updates: 1}\n" + "\n".join(f"{key}: {text}" for key, text in sections.items()))
    hint = f"; it is defined in {beside.name}, which importing.py imports: add --plugin {beside.name}"
    with pytest.raises(UsageError, match=f"unknown {mention}{re.escape(hint)}"):
        load(recipe, (), Registry([path], installed=[]))
    kind = {"model": "x_net", "data": "x_rows", "optimization": "x_fast"}[section]
    with pytest.raises(UsageError, match=re.escape(hint)):
        Registry([path], installed=[]).get(section, kind)
    registry = Registry([path, beside], installed=[])
    assert registry.provider(section, kind).name == beside.name


def test_a_plugin_file_that_only_imports_names_the_other_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_alone.py").write_text(FACES.format(prefix="x_"))
    path = tmp_path / "only_imports.py"
    path.write_text("from beside_alone import *\n")
    with pytest.raises(UsageError, match=r"; it imports those of beside_alone\.py: add --plugin beside_alone\.py"):
        Registry([path], installed=[])


WITHOUT = """
from runner.api import LearnerConfig

class Net(LearnerConfig):
    kind = "net"
    learns_from = "rows"
    {implementation}
"""


@pytest.mark.parametrize("implementation", ["", "implementation = 3", "def implementation(self): return Net"])
def test_settings_that_do_not_name_their_implementation_are_an_error_at_their_line(
    tmp_path, monkeypatch, implementation
):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(WITHOUT.format(implementation=implementation))
    registry = Registry([Path("mine.py")], installed=[])
    expected = (
        f"model.net of {registry.provider('model', 'net')}: Net.implementation should be the name of a class, for "
        'instance implementation = "Net" or ".net:Net"'
    )
    with pytest.raises(UsageError) as caught:
        registry.get("model", "net")
    assert str(caught.value) == expected
    Path("recipe.yaml").write_text("name: x\nmodel: {kind: net}\ndata: {kind: digits}\ntrain: {updates: 1}\n")
    with pytest.raises(RecipeError) as caught:
        load(Path("recipe.yaml"), (), Registry([Path("mine.py")]))
    assert [(problem.place.line, problem.message) for problem in caught.value.problems] == [(2, expected)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module", "plugin mine.py cannot be imported: ModuleNotFoundError"),
        ("def broken(:", "plugin mine.py cannot be imported: SyntaxError"),
        (
            "x = 1",
            "mine.py has no LearnerConfig, SourceConfig, ScheduleConfig, StageConfig or CallbackConfig with a kind",
        ),
        (None, "plugin mine.py cannot be read: No such file"),
    ],
)
def test_a_local_file_that_is_no_plugin(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        Registry([path], installed=[])


def test_the_built_in_plugins_are_what_they_say_and_import_nothing_heavy():
    code = """
import sys
from runner.plugin.registry import Registry
registry = Registry()
for section in ("model", "data", "optimization"):
    for kind in registry.kinds(section):
        assert registry.provider(section, kind).name == "proven-runner"
        assert registry.get(section, kind).__doc__
assert not {"torch", "mlflow", "optuna", "numpy"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
