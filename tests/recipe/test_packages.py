import subprocess
import sys
from functools import cache

import pytest

from runner.recipe import provenance
from runner.recipe.provenance import versions

WORLD = {
    "proven-runner 1.0": (
        "torch>=2",
        "mlflow<4,>=3",
        'Some_Env>=1; extra == "env"',
        "nvidia-ml-py; extra == 'nvidia'",
        'matplotlib; extra == "plots"',
        'pytest; extra == "test"',
        'proven-runner[env,plots]; extra == "test"',
    ),
    "torch 2.0+cpu": ("sympy>=1", "filelock", 'optree; extra == "optree"'),
    "sympy 3.0": ("mpmath (<1.4,>=1.1.0)",),
    "mpmath 4.0": ("torch",),
    "filelock 5.0": (),
    "numpy 6.0": (),
    "mlflow 7.0": ("flask", "numpy", "filelock", "sympy[all]>=1"),
    "flask 8.0": (),
    "some.env 9.0": ("env-core",),
    "env-core 10.0": (),
    "nvidia_ml_py 11.0": (),
    "matplotlib 12.0": ("numpy",),
    "pytest 13.0": (),
    "optree 14.0": (),
    "acme-rl 15.0": (
        "proven-runner",
        "acme.core!=2",
        'acme-fast; extra == "fast" and python_version > "3"',
        'acme-lint; extra == "dev"',
        "never-installed",
    ),
    "acme-core 16.0": (),
    "acme-fast 17.0": (),
    "acme-lint 18.0": (),
    "unrelated 19.0": (),
}
COMPUTING = {"torch", "sympy", "mpmath", "filelock", "numpy", "some-env", "env-core"}
TOOLS = {"proven-runner", "mlflow", "flask", "nvidia-ml-py", "matplotlib"}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Forgets what other tests have read of the environment."""
    monkeypatch.setattr(provenance, "_installed", cache(provenance._installed.__wrapped__))


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Distributions that are found before those of the environment."""
    for title, requirements in WORLD.items():
        name, version = title.split()
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_torch_numpy_and_environments_compute_and_the_rest_are_tools(world):
    packages, tools = versions(["proven-runner"])
    assert packages.keys() == COMPUTING
    assert tools.keys() == TOOLS
    assert list(packages) == sorted(packages)
    assert (packages["torch"], packages["some-env"], tools["mlflow"]) == ("2.0+cpu", "9.0", "7.0")


def test_a_plugin_computes_with_what_it_needs_but_not_with_the_runners_tools(world):
    packages, tools = versions(["proven-runner", "Acme_RL"])
    assert packages.keys() == COMPUTING | {"acme-rl", "acme-core", "acme-fast"}
    assert tools.keys() == TOOLS


def test_a_file_is_no_distribution(world):
    assert versions(["plugins/mine.py", "/tmp/x.py", "unknown", ""]) == versions(["proven-runner"])


def test_a_broken_distribution_is_no_reason_to_fail(world):
    (world / "env_core-10.0.dist-info" / "METADATA").unlink()
    packages, _ = versions([])
    assert packages["env-core"] == "unknown"


def test_of_this_environment_torch_computes_and_mlflow_does_not():
    packages, tools = versions(["proven-runner"])
    assert {"torch", "numpy", "mpe2", "pettingzoo", "gymnasium"} <= packages.keys()
    assert {"proven-runner", "mlflow", "optuna", "pydantic", "rich", "safetensors"} <= tools.keys()
    assert not packages.keys() & tools.keys()
    assert "pytest" not in packages.keys() | tools.keys()


def test_nothing_heavy_is_imported_for_it():
    code = "import sys; from runner.recipe.provenance import versions; versions([]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
