"""A training stops before its first update if its state would not come back from a checkpoint."""

from pathlib import Path

import pytest
import torch
from toy_runs import TOYS, Notes, toy_pipeline, trained, written

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system.errors import RunnerError
from runner.training import checkpoint, rehearsal
from runner.training.loop import Loop
from runner.training.pipeline import assemble
from runner.training.signals import Stop
from runner.training.state_difference import differences

ODD = Path(__file__).parent.parent / "odd_states.py"
SETS = ("train.updates=4", "train.checkpoint_every=2", "train.batch_size=8")


def odd_pipeline(folder, **model):
    written(folder)
    settings = ", ".join(f"{name}: {value}" for name, value in model.items())
    sets = [*SETS, f"model={{kind: odd_state, {settings}}}"]
    plugins = [TOYS, ODD]
    return assemble(load(folder / "toy.yaml", sets, Registry(plugins)), plugins)


def resumed(folder, pipeline):
    """The loop of a pipeline that has loaded the newest checkpoint of a folder."""
    notes = Notes()
    loop = Loop(pipeline, folder, notes, notes, Stop())
    loop.load_state_dict(checkpoint.load_newest(folder / "checkpoints"))
    return loop


BUFFERS = [
    "sparse",
    "complex128",
    "expanded",
    "expanded_inside",
    "conjugate",
    "float8",
    "scalar",
    "growing",
    "none",
    "late_fraction",
]


@pytest.mark.parametrize("buffer", BUFFERS)
def test_a_buffer_of_any_kind_is_resumed_with_its_layout(buffer, tmp_path):
    loop, _ = trained(tmp_path, odd_pipeline(tmp_path, buffer=buffer))
    before = loop.pipeline.learner.module.odd
    after = resumed(tmp_path / "run", odd_pipeline(tmp_path, buffer=buffer)).pipeline.learner.module.odd
    assert not list(differences(before, after))
    assert before.layout is not torch.strided or before.stride() == after.stride()
    if buffer in ("growing", "none"):
        assert after.shape == (4, 2)


def test_a_module_loads_its_state_by_its_version(tmp_path):
    loop, _ = trained(tmp_path, odd_pipeline(tmp_path, buffer="versioned"))
    learner = resumed(tmp_path / "run", odd_pipeline(tmp_path, buffer="versioned")).pipeline.learner
    assert not list(differences(loop.pipeline.learner.complete_state(), learner.complete_state()))


@pytest.mark.parametrize("memory", ["numbers", "tuples"])
def test_what_a_learner_remembers_is_resumed(memory, tmp_path):
    trained(tmp_path, odd_pipeline(tmp_path, memory=memory))
    learner = resumed(tmp_path / "run", odd_pipeline(tmp_path, memory=memory)).pipeline.learner
    assert learner.memory == {("words", 1) if memory == "tuples" else "words": 7}  # three are held-out batches
    learner.memory["new"] += 1


REFUSED = {
    "a function": ({"memory": "functions"}, r"learner/memory/f: a checkpoint cannot hold a builtin_function", 0),
    "a memory that becomes another type": ({"memory": "changed"}, r"memory: defaultdict has become dict after load", 0),
    "an object of the first update": ({"memory": "late"}, r"learner/memory/late: a checkpoint cannot hold a object", 1),
    "a memory that is not loaded": ({"memory": "lost"}, r"learner/memory/words: is lost after load_state_dict", 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_does_not_come_back_stops_the_training_by_name(name, tmp_path):
    model, message, updates = REFUSED[name]
    pipeline = odd_pipeline(tmp_path, **model)
    with pytest.raises(RunnerError, match=message) as error:
        trained(tmp_path, pipeline)
    assert "\n" not in str(error.value)
    assert pipeline.progress.updates == updates
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def broken(method):
    def load_state_dict(*_):
        method()

    return load_state_dict


def test_a_source_and_a_stage_that_cannot_load_their_state_are_refused_before_the_first_update(tmp_path):
    def fail():
        raise ValueError("no\nroom")

    for part in ("source", "stage"):
        pipeline = toy_pipeline(tmp_path, *SETS, "optimization.gradient_accumulation={micro_batch: 4}")
        target = pipeline.source if part == "source" else next(iter(pipeline.stages.values()))
        target.load_state_dict = broken(fail)
        with pytest.raises(RunnerError, match=r"load_state_dict fails .*: no room$"):
            trained(tmp_path, pipeline)
        assert pipeline.progress.updates == 0


def test_a_large_model_is_rehearsed_with_a_part_of_its_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "COMPLETE_BYTES", 100)
    monkeypatch.setattr(rehearsal, "EXCERPT_BYTES", 64)
    sizes = []
    write = rehearsal.write_rehearsal

    def measured(folder, rest, tensors):
        sizes.append(max(tensor.nbytes for tensor in tensors.values()))
        return write(folder, rest, tensors)

    monkeypatch.setattr(rehearsal, "write_rehearsal", measured)
    loop, _ = trained(tmp_path, toy_pipeline(tmp_path, *SETS))
    assert len(sizes) == 2
    assert max(sizes) <= 100
    assert loop.complete


def test_the_rehearsal_leaves_no_trace_on_the_disk_or_in_the_model(tmp_path, monkeypatch):
    sets = ("train.updates=6", "train.checkpoint_every=3", "train.ema=0.9", "data.augmented=true")
    sets += ("optimizer={kind: adamw, weight_decay: 0.1}", "lr_scheduler.kind=cosine")
    first, _ = trained(tmp_path / "with", toy_pipeline(tmp_path, *sets))
    monkeypatch.setattr("runner.training.loop.rehearse", lambda *arguments: None)
    second, _ = trained(tmp_path / "without", toy_pipeline(tmp_path, *sets))
    before, after = (each.pipeline.state_dict() for each in (first, second))
    assert not list(differences(before, after))
    names = [path.name for path in (tmp_path / "with" / "run" / "checkpoints").iterdir()]
    assert sorted(names) == ["step-000000000003", "step-000000000006"]


@pytest.mark.parametrize(
    ("losses", "best_step"),
    [
        ([3.0, 1.0, 2.0, 4.0, 5.0, 6.0], 2),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 1),
        ([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 6),
        ([2.0, 1.0, 2.0, 1.0, 2.0, 3.0], 4),
        ([-1.0, -3.0, 0.0, -2.0, 1e9, -2.5], 2),
    ],
    ids=["early", "first", "last", "latest of equals", "negative"],
)
@pytest.mark.parametrize("ema", ["null", "0.9"])
def test_the_best_evaluation_is_kept_without_checkpoints_on_the_way(tmp_path, losses, best_step, ema):
    pipeline = toy_pipeline(tmp_path, "train.updates=6", "train.evaluate_every=1", f"train.ema={ema}")
    remaining = iter([-1e9, *losses])  # the first is that of the rehearsal
    pipeline.source.evaluate = lambda learner: {"loss": next(remaining)}
    trained(tmp_path, pipeline)
    paths = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
    best = checkpoint.best(paths)
    assert best is not None
    assert checkpoint.read_manifest(best)["score"] == -losses[best_step - 1]
    assert checkpoint.load(best)["step"] == best_step


def test_metrics_that_another_thread_logs_meanwhile_change_nothing(tmp_path):
    class Growing(Notes):
        cursor = 0

        def mark(self):
            self.cursor += 282
            return self.cursor

    notes = Growing()
    Loop(odd_pipeline(tmp_path), tmp_path / "run", notes, notes, Stop()).run()
    assert notes.cursor


def test_the_state_of_a_source_on_a_gpu_is_not_expected_there_in_its_file(tmp_path, monkeypatch):
    """A state that was read is in host memory, and of it only the learner is loaded after the first update."""
    places_of = rehearsal._tensor_forms
    compared = []

    def places(state):
        found = places_of(state)
        compared.append(set(found))
        return found

    monkeypatch.setattr(rehearsal, "_tensor_forms", places)
    trained(tmp_path, odd_pipeline(tmp_path))
    assert any(not entry.startswith("pipeline/learner") for entry in compared[0])
    assert compared[-1]
    assert all(entry.startswith("pipeline/learner") for entry in compared[-1])


def test_an_entry_of_a_state_stays_inside_of_its_parents():
    state = {"pipeline": {"learner": {"weight": torch.ones(1)}, "source": 1}, "progress": 2}
    read = rehearsal.RehearsedState(state, True, {})
    assert read.part("pipeline", "learner").state == {"pipeline": {"learner": state["pipeline"]["learner"]}}
    assert read.part("pipeline").state == {"pipeline": state["pipeline"]}
