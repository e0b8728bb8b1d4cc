import shutil
import warnings
from types import SimpleNamespace

import optuna
import pytest
from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner, WilcoxonPruner
from optuna.trial import TrialState

from runner.study.config import ParameterConfig, StudyConfig
from runner.study.sampler import PerTrialSampler, pruner
from runner.study.space import Space
from runner.study.store import StudyStore
from runner.tracking import Workspace

KINDS = ["random", "tpe", "nsga2"]
DONE = 6
SPACE = {
    "optimization.cache": {"choice": ["off", "on"]},
    "optimization.cache.size": {"int": [1, 64], "log": True},
    "model.lr": {"float": [1e-4, 1e-2], "log": True},
    "data.envs": {"int": [1, 64]},
    "model.order": {"choice": ["forward", "backward", "sideways"]},
}


class KilledError(Exception):
    pass


def config(kind="tpe", **settings):
    whole = {"kind": "study", "name": kind, "recipe": "r", "space": SPACE, "objectives": {"eval/return": "maximize"}}
    startup = {} if kind == "random" else {"startup": 3 if kind == "tpe" else 50}
    return StudyConfig.model_validate(whole | {"sampler": {"kind": kind, **startup}} | settings)


def space():
    searched = {path: ParameterConfig(**settings) for path, settings in SPACE.items()}
    return Space.of(searched, {"cache": ()}, ())


def suggest(trial, most=99):
    """What a trial is suggested, one setting after the other; the worker is killed after so many."""
    asked = []

    def ask(parameter):
        if len(asked) == most:
            raise KilledError
        asked.append(parameter.path)
        return parameter.suggested(trial)

    try:
        return space().settle(ask)
    except KilledError:
        return None


def outcome(settled):
    return settled["model.lr"] * settled["data.envs"] + settled.get("optimization.cache.size", 0)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A storage with a study for every sampler: some trials are done, and two wait."""
    made = Workspace(tmp_path_factory.mktemp("begun"))
    store = StudyStore.open(made)
    for kind in KINDS:
        study = optuna.create_study(
            storage=store, study_name=kind, direction="maximize", sampler=PerTrialSampler(config(kind))
        )
        for number in range(DONE):
            study.enqueue_trial({})
            trial = store.trial(study, number)
            study.tell(trial, outcome(suggest(trial)))
        study.enqueue_trial({})
        study.enqueue_trial({})
    store.engine.dispose()
    return made.root / "optuna.db"


@pytest.fixture
def again(begun, tmp_path):
    """Opens copies of that storage, in which a study stands as it stood there."""
    opened = []

    def copy(kind, **settings):
        root = tmp_path / str(len(opened))
        root.mkdir()
        shutil.copy(begun, root / "optuna.db")
        store = StudyStore.open(Workspace(root))
        opened.append(store)
        study = optuna.load_study(storage=store, study_name=kind, sampler=PerTrialSampler(config(kind, **settings)))
        study.get_trials()  # as a worker does before it takes one
        return SimpleNamespace(study=study, trial=lambda number=DONE: store.trial(study, number))

    yield copy
    for store in opened:
        store.remove_session()
        store.engine.dispose()


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_that_is_begun_again_is_suggested_the_same(again, kind):
    whole = suggest(again(kind).trial())
    interrupted = again(kind)
    for most in range(len(whole)):
        assert suggest(interrupted.trial(), most) is None
        interrupted.study.sampler = PerTrialSampler(config(kind))  # of another process
    assert suggest(interrupted.trial()) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_also_by_the_worker_that_had_begun_it(again, kind):
    whole = suggest(again(kind).trial())
    for most in (1, 2):
        interrupted = again(kind)
        assert suggest(interrupted.trial(), most) is None
        assert suggest(interrupted.trial(), most + 1) is None
        assert suggest(interrupted.trial()) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_suggested_is_what_the_storage_has(again, kind):
    opened = again(kind)
    settled = suggest(opened.trial())
    kept = opened.study.get_trials()[DONE]
    assert kept.state == TrialState.RUNNING
    assert kept.params == {path: value for path, value in settled.items() if path in kept.params}
    assert suggest(opened.trial()) == settled


@pytest.mark.parametrize("kind", ["random", "nsga2"])
def test_trials_beside_each_other_do_not_change_each_other(again, kind):
    alone = suggest(again(kind).trial(DONE + 1))
    beside = again(kind)
    suggest(beside.trial(DONE), 2)
    assert suggest(beside.trial(DONE + 1)) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_is_suggested_the_same_whichever_was_begun_last(again, kind):
    found = []
    for order in ((DONE, DONE + 1), (DONE + 1, DONE)):
        opened = again(kind)
        trials = {number: opened.trial(number) for number in order}
        found.append(suggest(trials[DONE]))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_every_trial_and_every_seed_is_suggested_something_else(again, kind):
    found = [again(kind).trial(DONE), again(kind).trial(DONE + 1), again(kind, seed=5).trial(DONE)]
    assert len({suggest(trial)["model.lr"] for trial in found}) == 3


def test_trials_done_count_for_tpe_and_not_for_chance(again):
    for kind, changes in (("tpe", True), ("random", False)):
        before, after = again(kind), again(kind)
        for number in range(3):
            settled = {"model.lr": 1e-4 * (number + 1), "data.envs": 60, "model.order": "sideways"}
            distributions = {name: after.study.trials[0].distributions[name] for name in settled}
            after.study.add_trial(optuna.create_trial(params=settled, distributions=distributions, value=1e6 + number))
        assert (suggest(before.trial()) != suggest(after.trial())) == changes


def test_the_recipe_as_it_is_comes_as_it_was_put_into_the_queue(again):
    opened = again("tpe")
    given = {"optimization.cache": "on", "optimization.cache.size": 5, "model.lr": 1e-3}
    opened.study.enqueue_trial(given)
    settled = suggest(opened.trial(DONE + 2))
    assert given.items() <= settled.items()
    assert settled.keys() == SPACE.keys()


def test_no_sampler_is_called_experimental(again):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in KINDS:
            assert suggest(again(kind).trial())


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, MedianPruner),
        ({"pruner": {"kind": "hyperband"}}, HyperbandPruner),
        ({"seeds": 3}, WilcoxonPruner),
        ({"pruner": {"kind": "off"}}, NopPruner),
        ({"objectives": {"eval/a": "maximize", "eval/b": "minimize"}}, NopPruner),
    ],
)
def test_the_pruner_is_optunas_own(settings, kind):
    assert type(pruner(config(**settings), 1000, 100)) is kind


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_hyperband_leaves_suggestions_what_they_are(again, kind):
    found = []
    for most in (99, 1):
        opened = again(kind)
        opened.study.pruner = pruner(config(pruner={"kind": "hyperband"}), 1000, 100)
        suggest(opened.trial(), most)
        found.append(suggest(opened.trial()))
    assert found[0] == found[1]
