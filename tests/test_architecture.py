"""Imports point one way, plugins know the core by its api alone, and no file holds two things."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from language import SourceFile

ROOT = Path(__file__).parents[1]
BOTTOM = {"", "api", "plugin", "system"}
MAY_IMPORT = {
    "recipe": BOTTOM,
    "distributed": BOTTOM | {"recipe"},
    "proof": BOTTOM,
    "tracking": BOTTOM | {"recipe"},
    "child": BOTTOM | {"recipe"},
    "memory": BOTTOM,
    "training": BOTTOM | {"recipe", "tracking", "child", "distributed", "memory", "proof"},
    "verify": BOTTOM | {"recipe", "training", "proof", "child", "distributed"},
    "serve": BOTTOM | {"recipe", "training", "tracking"},
    "ablation": BOTTOM | {"recipe", "training", "proof", "child", "distributed", "verify", "tracking", "memory"},
    "study": BOTTOM | {"recipe", "training", "proof", "child", "verify", "tracking"},
}
"""By part of ``runner``; the command line may import everything, and nothing imports it."""
FAMILY = re.compile(
    r"(?<![a-z])(?<!user-)(?<!content-security-)(?<!omp_wait_)(env_steps?|replay|actor|agent|episode|policy|simulates)(?=s?(?![a-z]))",
    re.IGNORECASE,
)
"""Words of one family of experiments; ``refactor``, headers of HTTP and ``OMP_WAIT_POLICY`` are none."""
UNITS = {"env_steps"}
FAMILY_WORDS = {
    "runner/plugin/progress.py": UNITS,
    "runner/recipe/recipe.py": UNITS,
}
"""Where the core may use which of them: in the list of units, and what is said of it."""
SEQUENCE = re.compile(r"(^|\.)(next_batch|feedback)$|slots\.update$")
TRAINING_STEP = "runner/training/step.py"
PRINTERS = {"runner/system/terminal.py", "runner/system/console.py"}
"""Through these all that is printed goes: they escape what commands a terminal."""
RICH = re.compile(
    r"rich\.(box|cells\.cell_len|console\.(Group|RenderableType|JustifyMethod)|live\.Live|measure\.Measurement|"
    r"progress_bar\.ProgressBar|table\.(Table|Column))"
)
"""Of rich, what neither prints by itself nor takes text for markup."""
PRINTING_MODULES = re.compile(r"(rich|click|typer\.(echo|secho|style|rich_utils)|colorama|curses|tqdm)(\.|$)")
PRINTING = re.compile(
    r"print|input|(sys\.)?(__)?std(out|err)(__)?\.(buffer\.)?(write|writelines)|traceback\.print_\w+|warnings\.showwarning|"
    r"logging\.(StreamHandler|basicConfig)|os\.write|.*\.from_(ansi|markup)"
)
TO_OTHER_FILES = {"runner/tracking/spool.py": {"os.write"}}
"""Calls of those names that write to a file of their own."""
LONGEST_FILE = 3600  # names, operators and numbers: about 400 lines
LONGEST_FUNCTION = 720
LONGEST_CHAIN = 10
"""Edges of imports that run when a module is loaded."""

CORE = sorted((ROOT / "runner").rglob("*.py"))
PLUGINS = sorted((ROOT / "plugins").rglob("*.py"))


@cache
def syntax(path: Path) -> ast.Module:
    """Returns the syntax tree of a file; it is shared by all tests, so nothing may change it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, package: str, functions: bool = True) -> Iterator[str]:
    """Absolute names of what a file imports when it runs, or when it is loaded; names for annotations do not run."""
    parents = [*package.split("."), *path.relative_to(ROOT).parts[1:-1]]
    for node in walk_what_runs(syntax(path), functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            module = ".".join([*base, node.module or ""]).rstrip(".")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def walk_what_runs(node: ast.AST, functions: bool) -> Iterator[ast.AST]:
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not functions:
        return
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    for child in ast.iter_child_nodes(node):
        yield from walk_what_runs(child, functions)


def part_of(module: str) -> str | None:
    """Which part of ``runner`` a module is: ``recipe`` for ``runner.recipe.lock.drift``; None if it is none."""
    names = module.split(".")
    if names[0] != "runner":
        return None
    known = {path.stem if path.suffix == ".py" else path.name for path in (ROOT / "runner").iterdir()} | {"plugins"}
    return names[1] if len(names) > 1 and names[1] in known else ""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def violations(rule: Callable[[Path], object], paths: Iterable[Path]) -> dict[str, object]:
    """Returns what a rule finds in each file, by name; files in which it finds nothing are left out.

    One test for all files: thousands of tests of a millisecond cost each test process seconds to collect and report.
    """
    results = {name_of(path): rule(path) for path in paths}
    assert results
    return {name: result for name, result in results.items() if result}


def test_imports_of_the_core_point_one_way():
    def forbidden_parts(path):
        package = path.relative_to(ROOT / "runner").parts[0].removesuffix(".py")
        if package in ("cli", "__init__", "__main__"):
            return set()
        allowed = (BOTTOM | {"recipe"}) if package in BOTTOM else MAY_IMPORT.get(package)
        assert allowed is not None, f"MAY_IMPORT has no entry for '{package}'"
        parts = {part_of(module) for module in imports(path, "runner")}
        return parts - allowed - {package, None}

    assert violations(forbidden_parts, CORE) == {}


def test_plugins_import_the_api_and_each_other():
    def forbidden_modules(path):
        modules = {module for module in imports(path, "runner.plugins") if part_of(module) is not None}
        return {module for module in modules if not module.startswith(("runner.api.", "runner.plugins"))}

    assert violations(forbidden_modules, PLUGINS) == {}


def test_the_core_knows_no_family():
    def family_words(path):
        return {match[1].lower() for match in FAMILY.finditer(path.read_text(encoding="utf-8"))}

    assert violations(family_words, CORE) == FAMILY_WORDS


def printing_calls(path):
    """Imports and calls that print past the terminal module."""
    package = "runner.plugins" if path in PLUGINS else "runner"
    names = {name for name in imports(path, package) if PRINTING_MODULES.match(name) and not RICH.fullmatch(name)}
    # By which typer prints help: with a console of ours, which that function gives it.
    names -= {"typer.rich_utils", "typer.rich_utils.rich_format_error"}
    tree = syntax(path)
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    calls |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "print"}
    printing = {call for call in calls if PRINTING.fullmatch(call)}
    return names | (printing - TO_OTHER_FILES.get(name_of(path), set()))


def test_all_that_is_printed_goes_through_one_place():
    """Else a name that a stranger has chosen could command the terminal of who reads it."""
    paths = [path for path in (*CORE, *PLUGINS) if name_of(path) not in PRINTERS]
    assert violations(printing_calls, paths) == {}


def test_the_sequence_of_a_training_step_stands_once():
    """Draw, update, feedback: who needs a part of it asks the step."""
    callers = {
        name_of(path)
        for path in [*CORE, *PLUGINS]
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.Call) and SEQUENCE.search(ast.unparse(node.func))
    }
    assert callers == {TRAINING_STEP}


def test_a_file_holds_one_thing():
    def too_long(path):
        functions = [
            node for node in ast.walk(syntax(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        lines = SourceFile(path).code_tokens()
        tokens = {node.name: sum(node.lineno <= line <= node.end_lineno for line in lines) for node in functions}
        names = [name for name, count in tokens.items() if count > LONGEST_FUNCTION]
        return names + [f"{len(lines)} tokens"] * (len(lines) > LONGEST_FILE)

    assert violations(too_long, [*CORE, *PLUGINS]) == {}


def test_every_package_is_installed():
    """An editable installation finds them all the same; a wheel does not."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = [path.parent.relative_to(ROOT) for path in (*CORE, *PLUGINS) if path.name == "__init__.py"]
    found = {
        ".".join(["runner", *folder.parts] if folder.parts[0] == "plugins" else folder.parts) for folder in folders
    }
    assert found | {"runner.recipes"} == set(named)


def test_no_two_classes_have_one_name():
    homes = defaultdict(list)
    for path in (*CORE, *PLUGINS):
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name_of(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def module_of(path):
    """Its dotted name: ``runner.training`` for its ``__init__.py``; plugins are in ``runner.plugins``."""
    names = list(path.relative_to(ROOT).with_suffix("").parts)
    names = ["runner", *names] if names[0] == "plugins" else names
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def test_no_chain_of_imports_is_long():
    homes = {module_of(path): path for path in (*CORE, *PLUGINS)}

    @cache
    def chain(module):
        """The longest from a module on."""
        path = homes[module]
        names = imports(path, "runner.plugins" if path in PLUGINS else "runner", functions=False)
        found = {name if name in homes else name.rpartition(".")[0] for name in names} & homes.keys() - {module}
        return [module, *max(map(chain, found), key=len, default=[])]

    longest = max(map(chain, homes), key=len)
    assert len(longest) - 1 <= LONGEST_CHAIN, " -> ".join(longest)


IN_WORKSPACES = ("ablation", "child", "recipe", "serve", "study", "tracking", "training", "verify")
"""Parts of ``runner`` that write, rename or delete in workspaces."""
WRITING_METHODS = {"write_text", "write_bytes", "unlink", "rename", "rmdir", "mkdir", "touch", "hardlink_to"}
WRITING_MODULES = {
    "os": {
        "open", "replace", "rename", "renames", "remove", "removedirs", "unlink", "link", "rmdir", "mkdir", "makedirs",
        "truncate", "mkfifo", "mknod", "chmod", "chown",
    },
    "shutil": {"rmtree", "move", "copy", "copy2", "copyfile", "copytree", "copymode", "copystat"},
}  # fmt: skip


def writes(tree):
    """Calls that write, rename or delete without the module for files."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        arguments = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
        modes = [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        is_written = any(re.fullmatch(r"[rbt]*[wax+][wax+bt]*", mode) for mode in modes)
        if isinstance(called, ast.Name) and called.id == "open" and is_written:
            # A descriptor comes from the module for files.
            if not (isinstance(node.args[0], ast.Call) and ast.unparse(node.args[0].func) == "open_file"):
                yield ast.unparse(node)
        elif isinstance(called, ast.Attribute):
            module = ast.unparse(called.value)
            is_path_replaced = called.attr == "replace" and len(node.args) == 1 and not node.keywords
            if module == "files":
                continue
            if module in WRITING_MODULES:
                if called.attr in WRITING_MODULES[module]:
                    yield ast.unparse(node)
            elif called.attr in WRITING_METHODS or is_path_replaced or (called.attr == "open" and is_written):
                yield ast.unparse(node)


def test_one_module_writes_in_workspaces():
    paths = [path for path in CORE if path.parts[-2] in IN_WORKSPACES]
    assert violations(lambda path: list(writes(syntax(path))), paths) == {}


@pytest.mark.parametrize(
    "call",
    [
        'path.write_text("x")', "path.write_bytes(b'')", "path.unlink(missing_ok=True)", "path.rename(other)",
        "path.replace(other)", "path.mkdir()", "path.touch()", "os.replace(a, b)", "os.remove(a)", "os.open(a, 0)",
        "os.makedirs(a)", "shutil.rmtree(a)", "shutil.copy(a, b)", "shutil.move(a, b)", 'open(a, "w")',
        'open(a, "rb+")', 'path.open("ab")', 'path.open(mode="x")', 'open(path, mode="a")', "path.rmdir()",
    ],
)  # fmt: skip
def test_a_write_is_noticed(call):
    assert list(writes(ast.parse(call))) == [ast.unparse(ast.parse(call))]


@pytest.mark.parametrize(
    "call", ['text.replace("a", "b")', 'open(a, "rb")', "path.open()", 'open(open_file(a, 1), "ab")', "os.write(1, b)"]
)
def test_what_does_not_write_is_not(call):
    assert list(writes(ast.parse(call))) == []


READABLE_JSON = {"runner/tracking/workspace.py": 1}
"""Files that may indent JSON themselves, with the number of calls: a record is read by the runner alone."""


def indented_json(tree):
    """Calls that make JSON for readers, which is indented, without the encoder for numbers that JSON does not have."""
    for node in ast.walk(tree):
        is_encoding = isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump")
        if is_encoding and any(keyword.arg == "indent" for keyword in node.keywords):
            yield ast.unparse(node)


def test_one_encoder_makes_json_for_other_programs():
    def too_many(path):
        calls = list(indented_json(syntax(path)))
        return calls[READABLE_JSON.get(name_of(path), 0) :]

    assert violations(too_many, CORE) == {}
    assert len(list(indented_json(ast.parse("json.dumps(a, indent=1)\njson.dumps(a)")))) == 1


UNPICKLING = re.compile(
    r"(torch|joblib|dill|cloudpickle|pickle|_pickle|cPickle|marshal|shelve|jsonpickle)\.(load|loads|open|Unpickler|decode)"
    r"|torch\.(export|jit|package|hub)\.\w*load\w*|torch\._inductor\.aoti_load_package|(np|numpy)\.load|pd\.read_pickle"
)
"""Calls that can execute what is in a file."""
OWN_BYTES = {"runner/plugin/failures.py": {"pickle.loads"}, "runner/ablation/compared_trainings.py": {"torch.load"}}
"""Those that read what the same program has just written, into memory or to its own process."""


def unpickles(tree):
    """Calls that unpickle; numpy's only if it is allowed to."""
    for node in ast.walk(tree):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if not UNPICKLING.fullmatch(called):
            continue
        allowed = [keyword.value for keyword in node.keywords if keyword.arg == "allow_pickle"]
        if called in ("np.load", "numpy.load") and all(ast.unparse(value) == "False" for value in allowed):
            continue
        yield called


def test_no_file_is_unpickled():
    assert violations(lambda path: set(unpickles(syntax(path))), [*CORE, *PLUGINS]) == OWN_BYTES


@pytest.mark.parametrize("argument", ["path", "io.BytesIO(content)", "file, weights_only=False", "*given"])
@pytest.mark.parametrize(
    "call",
    [
        "torch.load", "torch.export.load", "torch.jit.load", "torch.hub.load", "torch._inductor.aoti_load_package",
        "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open", "joblib.load", "dill.loads",
        "pd.read_pickle",
    ],
)  # fmt: skip
def test_a_call_that_unpickles_is_found(call, argument):
    assert list(unpickles(ast.parse(f"def f():\n    return {call}({argument})"))) == [call]
