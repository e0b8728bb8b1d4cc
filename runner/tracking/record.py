"""The record of a run in its workspace, in addition to MLflow's."""

import time
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from runner.system.processes import Owner

STALE_SECONDS = 600.0
"""Age of a heartbeat after which the owner on another machine may be gone; whether it is, is then observed."""
Status = Literal["FINISHED", "FAILED", "STOPPED", "PREEMPTED", "KILLED"]
"""How a run ended: STOPPED by a signal, PREEMPTED by one that its recipe expects, KILLED if its process died."""
Kind = Literal["run", "ablation", "study", "seeds", "folds", "grid"]
GROUPS = ("seeds", "folds", "grid")
"""Kinds that are groups of runs."""
REPEATED = ("seeds", "folds")
"""Groups whose runs are repetitions, so that they have means."""
_NAME = r"^[A-Za-z0-9-][A-Za-z0-9._-]{0,127}$"
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Time = Annotated[float, Field(gt=-1e11, lt=1e11)]


class Record(BaseModel, frozen=True, ser_json_inf_nan="strings"):
    """The record of a run, an ablation, a study or a group of seeds, in its folder's
    ``run.json``.
    """

    name: Annotated[str, Field(pattern=_NAME)]
    """``<recipe>-<8 digits>`` with the first digits of MLflow's id; the name of the folder and of
    the run in MLflow.
    """
    recipe: str
    digest: str
    """Of the recipe."""
    goal: _Count
    unit: str
    """Unit of ``goal`` and ``step``."""
    experiment: str
    tracking_uri: str
    """MLflow's store, without a password; see ``Workspace.recorded_uri``."""
    owner: Owner
    started: _Time
    """Seconds since 1970, as all times here."""
    heartbeat: _Time
    """When the owner was last seen alive."""
    step: _Count = 0
    run_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None
    """MLflow's id; None until MLflow has the run."""
    status: Literal["RUNNING"] | Status = "RUNNING"
    reason: str = ""
    """Why it failed."""
    group: Annotated[str, Field(pattern=rf"^$|{_NAME}")] = ""
    """The name of the group of seeds to which the run belongs, if any."""
    bounds: dict[str, tuple[float, float]] = {}
    """Of a group of seeds, the smallest and the largest possible value of evaluation metrics, by pattern."""
    digests: dict[int, str] = {}
    """Of a group of seeds, the digest of every run's recipe, by seed."""
    kind: Kind = "run"
    processes: Annotated[int, Field(ge=1)] = 1
    """Processes that train it together."""
    seconds: _Time = 0.0
    """How long processes have been at it."""
    overrides: dict[str, str] = {}
    """Assignments of the command line, by dotted path."""
    headline: tuple[str, ...] = ()
    """The metrics that a person looks at first, the objective before all others."""
    metrics: dict[str, float] = {}
    """The newest value of each."""
    synthetic: bool = False
    """Whether the data are synthetic."""
    smoke: bool = False
    """Whether it is a smoke test."""
    changed_by: str = ""
    """What callbacks have changed in the learner, as one line; empty if nothing."""
    tags: dict[str, str] = {}
    note: str = ""
    """The user's description, like the tags."""

    @property
    def at_work(self) -> bool:
        """Returns whether its owner seems to run; the lock of a training's folder is more
        precise.
        """
        return self.status == "RUNNING" and self.owner.alive is not False

    @property
    def is_stale(self) -> bool:
        """Returns whether the last heartbeat is old, or in the future because of a wrong clock."""
        return not 0 <= time.time() - self.heartbeat < STALE_SECONDS
