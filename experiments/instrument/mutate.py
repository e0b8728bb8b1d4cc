"""Changes the code of the stages in one place at a time, and asks the gate whether it notices.

    python experiments/instrument/mutate.py --list               # how many changes there are, by file
    python experiments/instrument/mutate.py                      # those that ``mutants.json.gz`` does not have yet
    python experiments/instrument/mutate.py --only forward_cache --shard 1/2 --every 3
    python experiments/instrument/mutate.py --again PASS --updates 20   # those that passed, at the gate's own length
    python experiments/instrument/mutate.py --before 2026-11-29         # those that were judged before that day

Three sorts: a change in the file of a stage, which is put into the module before anybody asks for it; a change in a
method of a learner that is a slot, which a stage then puts in its place (``slot_mutant.py``); and a change anywhere
else in a package, of which a second copy is imported, whose classes a stage then gives to the learner, the source and
all that they hold (``module_mutant.py``), once they are built. Each is judged in a process of its own. Before that, the
unchanged code is judged with every line that is run recorded: what is changed in a line that never runs here, such as
one for a GPU or one that builds what is built already, cannot be noticed here, and is counted apart.

What the gate passes is explained by hand, in ``survivors.yaml``.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib
import json
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from copied import classes_of_copy
from filelock import FileLock
from judge import CRASHED, INACTIVE, LATE, REFUSED, ROOT, in_child, verdict_of
from mutations import changes
from running import SMALL

HERE = Path(__file__).parent
RESULTS, TABLE, EXPLAINED = HERE / "mutants.json.gz", HERE / "mutants.md", HERE / "survivors.yaml"
SLOT_PLUGIN, MODULE_PLUGIN = HERE / "slot_mutant.py", HERE / "module_mutant.py"
FEWEST = 4
"""Updates by which a change is tried at first; most are noticed in one."""
LONGEST = 300.0
"""Seconds for one of them, beyond which it counts as out of time."""
NOT_RUN = "not run"
"""Of a change in a line that the unchanged code does not run here."""


class Target(NamedTuple):
    """Code that is changed, and the stage and the recipe by which it is judged."""

    file: str
    kind: str
    recipe: str
    sets: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    """If any: methods of a learner in the file, which ``mutated_slot`` replaces."""
    owner: str = ""
    """The class with these methods."""
    without: tuple[str, ...] = ()
    """Functions that are left out, because another target has them."""
    reload: tuple[str, ...] = ()
    """Modules that have imported names of this one."""
    traced_only: bool = False
    """Whether what is compiled is run by eager kernels, because compiling C++ takes most of a minute."""

    @property
    def copied(self) -> bool:
        """Whether a second copy of the flagship's package has the change, and not the first."""
        return self.kind == "mutated_module"

    @property
    def module(self) -> str:
        """Its name."""
        name = self.file.removesuffix(".py").replace("/", ".")
        return name if name.startswith("runner.") else f"runner.{name}"

    @property
    def name(self) -> str:
        """What it is called in results."""
        return f"{self.file} by {self.kind} on {self.recipe}"

    def wanted(self, name: str) -> bool:
        """Whether a function is to be changed: no face of a plugin, whose words people read."""
        if self.slots:
            return name in {f"{self.owner}.{slot}" for slot in self.slots}
        return name not in self.without and not name.rpartition(".")[0].endswith("Config")


SHORT = ("data.followers=2", "data.episode_limit=20", "data.evaluation.episodes=64")
"""Three agents; with two, their number is that of an agent's critics, and the one may stand for the other. The episodes
are short: those of 1,000 steps take most of the time, and none ends in the few steps that are compared."""
PAIR = (*SHORT, "optimization.forward_cache=on", "optimization.merged_critic_loss=on")
STACKED = (*PAIR, "optimization.stacked_agents=on")
MASAC = (
    "target", "targets", "critic_step", "actor_step", "temperature_step", "target_step", "critic_gradients",
    "actor_gradients", "temperature_gradients", "critic_loss", "actor_loss", "temperature_loss", "next_actions",
    "current_action", "actor_forward", "critic_forward", "temperatures",
)  # fmt: skip
DROPOUT = ("model.dropout=0.1",)
MOLECULES = (*SMALL["gps"], "model.dropout=0", "train.updates=400")
GRASPS = (*SMALL["grasp_diffusion"], "train.updates=400")
STAGES, MARL = "plugins/stages", "plugins/marl"
PACKAGE = "runner.plugins.marl"
ENTRY_MODULES = (f"{PACKAGE}.masac", f"{PACKAGE}.uav.source")
"""What imports all of the package that a training of it has."""
UNIFORM = (*SHORT, "data.replay={kind: uniform, capacity: 4000}")
LEARNER = "runner/plugin/learner.py"
TARGETS = (
    Target(f"{MARL}/stages/forward_cache.py", "forward_cache", "marl_baseline", SHORT),
    Target(f"{MARL}/stages/merged_critic_loss.py", "merged_critic_loss", "marl_baseline", SHORT),
    Target(f"{MARL}/stages/stacked_agents.py", "stacked_agents", "marl_baseline", STACKED),
    Target(f"{MARL}/stacked.py", "stacked_agents", "marl_baseline", STACKED),
    Target(f"{MARL}/layout.py", "stacked_agents", "marl_baseline", STACKED, reload=("runner.plugins.marl.stacked",)),
    Target(f"{STAGES}/activation_checkpointing.py", "activation_checkpointing", "shakespeare_gpt", DROPOUT),
    Target(f"{STAGES}/amp.py", "amp", "digits_classifier"),
    Target(f"{STAGES}/bucketing.py", "bucketing", "gps_esol", MOLECULES),
    Target(f"{STAGES}/channels_last.py", "channels_last", "digits_classifier"),
    Target(f"{STAGES}/compile.py", "compile", "digits_classifier", traced_only=True),
    Target(f"{STAGES}/float32_matmul.py", "float32_matmul", "shakespeare_gpt"),
    Target(f"{STAGES}/fused_optimizer.py", "fused_optimizer", "digits_classifier"),
    Target(
        f"{STAGES}/gradient_accumulation.py", "gradient_accumulation", "digits_classifier",
        ("optimization.gradient_accumulation.micro_batch=24",),
    ),
    Target(f"{STAGES}/heap_retention.py", "heap_retention", "digits_classifier"),
    Target(f"{STAGES}/preprocess_once.py", "preprocess_once", "gps_esol", MOLECULES),
    Target(f"{MARL}/masac.py", "mutated_slot", "marl_baseline", SHORT, slots=MASAC, owner="Masac"),
    Target(
        f"{MARL}/masac.py", "mutated_module", "marl_baseline", SHORT,
        without=tuple(f"Masac.{slot}" for slot in MASAC),
    ),
    *(
        Target(f"{MARL}/{file}.py", "mutated_module", "marl_baseline", SHORT)
        for file in (
            "networks", "roles", "simulator", "replay/block_sums", "replay/buffer", "replay/build",
            "replay/prioritized", "uav/environment", "uav/rewards", "uav/source",
        )
    ),
    Target(f"{MARL}/replay/uniform.py", "mutated_module", "marl_baseline", UNIFORM),
    Target(
        "plugins/vision/image_classifier.py",
        "mutated_slot",
        "digits_classifier",
        slots=("loss",),
        owner="ImageClassifier",
    ),
    Target(
        "plugins/sequences/language_model.py", "mutated_slot", "shakespeare_gpt", slots=("loss",),
        owner="LanguageModel",
    ),
    Target("plugins/graphs/gps.py", "mutated_slot", "gps_esol", MOLECULES, slots=("loss",), owner="Gps"),
    Target(
        "plugins/grasps/learner.py", "mutated_slot", "grasp_diffusion", GRASPS,
        slots=("loss",), owner="GraspDiffusion",
    ),
    Target(
        LEARNER, "mutated_slot", "digits_classifier", ("train.ema=0.9",), slots=("forward", "forward_backward"),
        owner="GradientLearner",
    ),
)  # fmt: skip
ELSEWHERE = {
    f"{STAGES}/async_transfer.py": "needs a GPU",
    f"{STAGES}/cuda_graph.py": "needs a GPU",
    f"{STAGES}/empty_cache.py": "needs a GPU",
    f"{STAGES}/batch_autotune.py": "chooses a batch size by timing child processes, which only trainings can judge",
    f"{MARL}/uav/flights.py": "draws plots of trained policies",
    f"{MARL}/uav/parallel.py": "hands the environment to others' programs; no training has it",
    f"{MARL}/work.py": "counts the least work of an update, for a limit in reports",
} | {
    f"{MARL}/pettingzoo/{file}.py": "adapts other environments to the simulator, which is tested with the UAV simulator"
    for file in ("build", "config", "cycle", "environment", "layout", "simulation", "source")
}
"""Files whose code is not run here, with the reason; their changes are counted."""
SURVIVED = ("PASS", "INCONCLUSIVE")
VERDICTS = ("FAIL", INACTIVE, "INCONCLUSIVE", REFUSED, CRASHED, LATE, "PASS", NOT_RUN)


def enumerated(target: Target) -> list[dict[str, Any]]:
    """All changes of a target by number."""
    tree = ast.parse((ROOT / target.file).read_text())
    found = []
    for number, change in enumerate(changes(tree, target.wanted)):
        compiles = _code(tree, target) is not None
        found.append(change._asdict() | {"number": number, "key": f"{target.file}: {change.function}: {change.what}",
                                         "target": target.name, "compiles": compiles})  # fmt: skip
    return found


def _source(target: Target) -> str:
    """What tracebacks call the code: in a second copy not as the first one, which runs as well."""
    return str(ROOT / target.file) + " (copy)" * target.copied


def _code(tree: ast.Module, target: Target) -> Any:
    try:
        return compile(tree, _source(target), "exec")
    except (SyntaxError, ValueError, TypeError):
        return None


def changed_verdict(position: int, number: int, updates: int) -> dict[str, Any]:
    """What the gate says of one change; in a process of its own."""
    target = TARGETS[position]
    tree = ast.parse((ROOT / target.file).read_text())
    for found, _ in enumerate(changes(tree, target.wanted)):
        if found == number:
            break
    return _verdict(target, _code(tree, target), updates)


def unchanged_verdict(position: int, updates: int) -> dict[str, Any]:
    """What the gate says of the code as it is, and which lines of it were run."""
    target = TARGETS[position]
    path = _source(target)
    lines: set[int] = set()

    def of_line(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            lines.add(frame.f_lineno)
        return of_line

    def of_call(frame: Any, *_: Any) -> Any:
        return of_line if frame.f_code.co_filename == path else None

    sys.settrace(of_call)
    threading.settrace(of_call)
    try:
        found = _verdict(target, _code(ast.parse((ROOT / target.file).read_text()), target), updates)
    finally:
        sys.settrace(None)
    return found | {"lines": sorted(lines)}


def _verdict(target: Target, code: Any, updates: int) -> dict[str, Any]:
    module = importlib.import_module(target.module)
    sets = list(target.sets)
    files = []
    if target.traced_only:
        from functools import partial

        import torch

        torch.compile = partial(torch.compile, backend="aot_eager")
    if target.slots:
        namespace = dict(vars(module))
        exec(code, namespace)
        files.append(SLOT_PLUGIN)
        _plugin(SLOT_PLUGIN).change({slot: vars(namespace[target.owner])[slot] for slot in target.slots})
    elif target.copied:
        for name in ENTRY_MODULES:
            importlib.import_module(name)
        from runner.plugin.context import STEP

        files.append(MODULE_PLUGIN)
        _plugin(MODULE_PLUGIN).change(classes_of_copy(PACKAGE, target.module, code), (*MASAC, *STEP))
    else:
        exec(code, vars(module))
        for name in target.reload:
            importlib.reload(importlib.import_module(name))
    import wrong_base

    sets = [*wrong_base.SETTINGS.get(target.recipe, ()), *sets]
    return verdict_of(target.kind, target.recipe, sets, files, updates, quick_first=target.copied)


def _plugin(file: Path) -> Any:
    """The module of a file of plugins."""
    from runner.plugin.registry import Registry

    Registry([file])
    return next(found for name, found in sys.modules.items() if name.startswith(f"runner_plugin_{file.stem}"))


def _is_run(change: dict[str, Any], lines: set[int]) -> bool:
    return any(line in lines for line in range(change["first"], change["last"] + 1))


def every(only: str) -> Iterator[tuple[int, Target]]:
    """The targets whose name has that in it."""
    return ((position, target) for position, target in enumerate(TARGETS) if only in target.name)


def explained() -> dict[str, str]:
    """Why a change that passes may pass, by its key."""
    return yaml.safe_load(EXPLAINED.read_text()) or {} if EXPLAINED.exists() else {}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the content of ``mutants.md``."""
    possible = {change["key"] for _, target in every("") for change in enumerated(target) if change["compiles"]}
    # The code of others was written anew since they were judged.
    rows = [row for key, row in results.items() if key in possible]
    why = explained()
    lines = ["# Small changes in the code of stages: how many the gate detects", ""]
    lines += [
        "Written by `mutate.py` from `mutants.json.gz`. `survivors.yaml` explains each change that is not detected.",
        "",
    ]
    lengths = " or ".join(map(str, sorted({row["updates"] for row in rows})))
    lines += [
        f"Tried: {len(rows)} of the {len(possible)} possible changes of these files, each with {lengths} updates.",
        "",
    ]
    by_commit = Counter(row.get("commit", "an earlier one") for row in rows)
    judged = ", ".join(f"{count:,} at {commit}" for commit, count in by_commit.most_common())
    lines += [f"By the code of commits: {judged}.", ""]
    lines += ["| code | tried | " + " | ".join(VERDICTS) + " | detected among those that run |"]
    lines.append("|---|---" + "|---" * len(VERDICTS) + "|---|")
    by_target: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_target[row["target"]].append(row)
    for name, mine in [*sorted(by_target.items()), ("all", rows)]:
        counts = Counter(row["verdict"] for row in mine)
        ran = len(mine) - counts[NOT_RUN]
        share = f"{1 - sum(counts[each] for each in SURVIVED) / ran:.0%}" if ran else ""
        lines.append(f"| {name} | {len(mine)} | " + " | ".join(str(counts[v]) for v in VERDICTS) + f" | {share} |")
    lines += ["", "Files that no recipe of this experiment runs:", ""]
    for file, reason in ELSEWHERE.items():
        count = sum(1 for _ in changes(ast.parse((ROOT / file).read_text()), Target(file, "", "").wanted))
        lines.append(f"* `{file}`, {count} changes: {reason}")
    survivors = sorted((row["key"], row) for row in rows if row["verdict"] in SURVIVED)
    unexplained = [key for key, _ in survivors if key not in why]
    lines += ["", f"{len(survivors)} changes pass or are INCONCLUSIVE; {len(unexplained)} of them have no explanation."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true", help="only make the table anew")
    parser.add_argument("--only", default="", help="a part of the name of what is changed")
    parser.add_argument("--shard", default="1/1", help="i/n")
    parser.add_argument("--every", type=int, default=1, help="one change in so many")
    parser.add_argument("--updates", type=int, default=FEWEST, help="compared one by one")
    parser.add_argument("--again", default="", help="ask anew about those with this verdict")
    parser.add_argument("--before", default="", metavar="DATE", help="ask anew about those that were judged before")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.shard.split("/"))
    results = _read_results()
    if arguments.list:
        for _, target in every(arguments.only):
            found = enumerated(target)
            print(f"{len(found):4} {sum(each['compiles'] for each in found):4} {target.name}")
        return
    if not arguments.table:
        for position, target in every(arguments.only):
            chosen = slice((part - 1) * arguments.every, None, parts * arguments.every)
            candidates = [change for change in enumerated(target)[chosen] if change["compiles"]]
            wanted = [change for change in candidates if _is_wanted(results.get(change["key"]), arguments)]
            if wanted:
                _judge(position, target, wanted, arguments.updates)
    TABLE.write_text(table(_read_results()))


def _read_results() -> dict[str, Any]:
    return json.loads(gzip.decompress(RESULTS.read_bytes())) if RESULTS.exists() else {}


def _write_results(results: dict[str, Any]) -> None:
    """Writes equal results as equal bytes."""
    text = json.dumps(dict(sorted(results.items())), indent=1) + "\n"
    RESULTS.write_bytes(gzip.compress(text.encode(), mtime=0))


def _is_wanted(result: dict[str, Any] | None, arguments: argparse.Namespace) -> bool:
    """Returns whether a change is to be judged, given its earlier result."""
    if result is None:
        return not arguments.again
    if arguments.before:
        return result.get("date", "") < arguments.before
    return result["verdict"] == arguments.again


def _judge(position: int, target: Target, wanted: list[dict[str, Any]], updates: int) -> None:
    """Judges changes of a target, and keeps every result as soon as it exists."""
    commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, text=True).strip()
    plain = in_child(unchanged_verdict, position, updates)
    if plain["verdict"] in (CRASHED, REFUSED, LATE, "FAIL"):
        raise SystemExit(f"{target.name}, unchanged: {plain['verdict']}, {plain['summary']}")
    print(f"--- {target.name}: unchanged {plain['verdict']}, {plain['summary'][:120]}", flush=True)
    if plain["verdict"] == INACTIVE:  # on this machine: nothing is learnt about its code here
        return
    lines = set(plain.pop("lines"))
    for change in wanted:
        if _is_run(change, lines):
            said = in_child(changed_verdict, position, change["number"], updates, timeout=LONGEST)
        else:
            said = {"verdict": NOT_RUN, "summary": "this line is not run here", "seconds": 0.0}
        with FileLock(f"{RESULTS}.lock"):  # another shard may have written meanwhile
            results = _read_results()
            origin = {"updates": updates, "commit": commit, "date": datetime.now(UTC).date().isoformat()}
            results[change["key"]] = {"key": change["key"], "target": target.name} | origin | said
            _write_results(results)
        print(f"{said['verdict']:13} {said['seconds']:5} s {change['key'].rpartition('/')[2][:110]}  "
              f"{said['summary'][:70]}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
