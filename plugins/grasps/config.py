"""The faces of the learners of grasps and of their data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from runner.api import (
    Config,
    DataFile,
    DataName,
    GradientLearnerConfig,
    Objective,
    PublishedDatasetConfig,
    ServedRequest,
    ServedResponse,
    SourceOutline,
    TensorOutline,
)

from ..settings import Count, Heads
from .served import DiffusionRequest, GraspRequest, GraspResponse

if TYPE_CHECKING:
    from .cube import CubeGrasps
    from .cvae import GraspCvae
    from .learner import GraspDiffusion

GRASPS = DataFile(
    name="leap_cube_grasps.npz",
    url="",
    sha256="73a6846ec7fdc1c799c3f9dd028f232e8be8f4e5cfe9d327c48a65fa26a63cb0",
    size=520_807,
    about="5,120 grasps of the LEAP hand on five cubes, held in a simulator, made from LEAP_Hand_Sim (MIT)",
)
BOXES = DataFile(
    name="leap_hand_boxes.npz",
    url="",
    sha256="533961dff8b66e9582bae83afb28bbcfa73ef9d9ddeead77a858282e62f33bf7",
    size=1_534,
    about="67 boxes of the LEAP hand's links, made from get_a_grip (MIT), which has them from dex-urdf (MIT)",
)


GRASP_NUMBERS = 25
"""Numbers that describe a grasp."""
PARENTS = (0, 1, 2, 3, 0, 5, 6, 7, 0, 9, 10, 11, 0, 13, 14, 15)
"""Links that the joints of the LEAP hand are on: four fingers with four joints each."""
HAND_KEYPOINTS, HAND_BOXES = 7, 67


class GraspLearnerConfig(GradientLearnerConfig):
    """What learners of grasps share: an encoder of clouds, and a transformer that works on sets of grasps."""

    learns_from: ClassVar[str] = "grasps"
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {"model": {"kind": "adamw", "lr": 1.2e-3, "max_grad_norm": 1.0}}
    slots: ClassVar[frozenset[str]] = GradientLearnerConfig.slots | {"group", "encode", "restoration"}
    request: ClassVar[type[ServedRequest]] = GraspRequest
    response: ClassVar[type[ServedResponse]] = GraspResponse
    page: ClassVar[str] = "page"

    straighten: bool = True
    """Whether clouds and grasps are turned about z until a cloud stands straight, and answers back: what a quarter turn
    cannot tell apart need not be learnt at every angle."""
    encoder: Literal["pointnet_lite", "pointnet2"] = "pointnet_lite"
    """Neighbourhoods of points, in one level or in two."""
    centres: Count = 32
    """Neighbourhoods: tokens that stand for a cloud."""
    neighbours: Count = 16
    """Points of each."""
    layers: Count = 4
    """Blocks of the transformer."""
    width: Annotated[int, Field(ge=2, multiple_of=2)] = 128
    """Numbers that stand for one grasp, or one token, between the blocks."""
    heads: Heads = 4
    """Attention heads of every block; they share the width among them."""


class GraspDiffusionConfig(GraspLearnerConfig):
    """Grasps of a hand, made from noise by a transformer that has seen the object as a cloud of points.

    It learns to say from a noisy grasp what it was (DDPM, arXiv:2006.11239; DiT, arXiv:2212.09748), for a set of grasps
    at once, and is asked that again and again while the noise is taken out.

    When it helps: there are many good answers, and their mean is none.
    When it hurts: an answer takes as many evaluations of the network as there are steps.
    """

    kind: ClassVar[str] = "grasp_diffusion"
    answering: ClassVar[frozenset[str]] = frozenset({"condition", "both"})
    slots: ClassVar[frozenset[str]] = GraspLearnerConfig.slots | answering
    request: ClassVar[type[ServedRequest]] = DiffusionRequest

    process: Literal["ddpm", "flow"] = "ddpm"
    """How noise is mixed in: so that the variance stays, or on a straight line (rectified flow)."""
    schedule: Literal["cosine", "linear_seed"] = "cosine"
    """How fast, with ``ddpm``. ``linear_seed`` never reaches noise alone, from which sampling begins all the same."""
    steps: Annotated[int, Field(ge=2, le=1000)] = 100
    """Levels of noise."""
    min_snr: Annotated[float, Field(gt=0)] | None = 1.0
    """With how much more signal than noise a level of noise counts in full; with less of it, it counts less, as nothing
    can be said there (Min-SNR, arXiv 2303.09556). null lets all count the same."""
    sampler: Annotated[Literal["ddpm", "ddim"], Field(validate_default=True)] = "ddpm"
    """Whether fresh noise is added while it is taken out."""
    sampling_steps: Count = 100
    """At how many levels ``ddim`` asks the network."""
    eta: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How much fresh noise ``ddim`` adds in every step: none, up to as much as ``ddpm``."""
    guidance: Annotated[float, Field(ge=0)] = 0.0
    """How far answers are pushed away from those without a cloud (classifier-free guidance); 0 asks once a step."""
    unconditional: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the training sets that are shown no cloud, as guidance needs it."""

    @field_validator("sampling_steps")
    @classmethod
    def _within_the_steps(cls, sampling_steps: int, info: ValidationInfo) -> int:
        if sampling_steps > (steps := info.data.get("steps", sampling_steps)):
            raise ValueError(f"should be at most the {steps} steps")
        return sampling_steps

    @field_validator("sampler")
    @classmethod
    def _fits_the_process(cls, sampler: str, info: ValidationInfo) -> str:
        if sampler == "ddpm" and info.data.get("process") == "flow":
            raise ValueError("'ddpm' has no meaning on a straight line: take 'ddim'")
        return sampler

    @field_validator("eta")
    @classmethod
    def _has_a_variance(cls, eta: float, info: ValidationInfo) -> float:
        if eta and info.data.get("process") == "flow":
            raise ValueError("should be 0 on a straight line, which no noise is added to")
        return eta

    def implementation(self) -> type[GraspDiffusion]:
        """The learner in torch."""
        from .learner import GraspDiffusion

        return GraspDiffusion


class GraspCvaeConfig(GraspLearnerConfig):
    """Grasps of a hand in one step, from a few numbers of chance (a conditional VAE, Sohn et al. 2015).

    When it helps: an answer has to come at once.
    When it hurts: what lies between two good answers comes out, too.
    """

    kind: ClassVar[str] = "grasp_cvae"
    depends_on_progress: ClassVar[bool] = True

    latent: Count = 32
    """Numbers of chance."""
    divergence: Annotated[float, Field(ge=0)] = 0.2
    """Weight of the divergence from a normal distribution."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Share of the training in which that weight grows from zero."""

    def implementation(self) -> type[GraspCvae]:
        """The learner in torch."""
        from .cvae import GraspCvae

        return GraspCvae


class AugmentConfig(Config):
    """By how much samples are changed that are trained on."""

    jitter_mm: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of what is added to every coordinate of a point, in millimetres."""
    degrees: Annotated[float, Field(ge=0, le=180)] = 0.0
    """How far cloud and grasps are turned together at most: about z, or with ``frame: random`` about any axis."""


class CubeGraspsConfig(PublishedDatasetConfig):
    """Grasps of the LEAP hand on cubes of five sizes, which a simulator has held, and clouds of points on the cubes.

    A sample is a cloud that is drawn anew and a few grasps of that cube. One size is never trained on; of the others a
    tenth is held out. Evaluation samples grasps and measures them: **valid** ones go no deeper than 5 mm into the cube
    and have two links within 5 mm, **strict** ones no deeper than 2 mm and three links. With ``synthetic: true`` a
    hand and its grasps are generated.
    """

    kind: ClassVar[str] = "cube_grasps"
    provides: ClassVar[str] = "grasps"
    headline: ClassVar[tuple[str, ...]] = ("strict", "valid", "diversity_mm")
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        **dict.fromkeys(("*valid", "*strict", "*coverage"), (0, 1)),
        "*_mm": (0, math.inf),
    }
    objective: ClassVar[Objective] = Objective("strict", "maximize", margin=0.05, unit="share")
    files: ClassVar[tuple[DataFile, ...]] = (GRASPS, BOXES)
    evaluation_seed: ClassVar[str] = "scene_seed"

    file: DataName = GRASPS.name
    """A path of an .npz, relative to the recipe; or the name of a file in the folders of data."""
    boxes: DataName = BOXES.name
    """The same, of the boxes of the hand's links."""
    points: Annotated[int, Field(ge=32)] = 256
    """Of a cloud."""
    grasps: Annotated[int, Field(ge=2)] = 16
    """Of a sample."""
    frame: Literal["yaw", "quarter", "object", "random"] = "yaw"
    """How cloud and grasps are turned together: about z by any angle, or by at most 45 degrees either way (a cube shows
    no more of it, and hands come from one side); not at all; or about any axis."""
    clouds: Count | None = None
    """Clouds of every cube, drawn and turned once, of which samples take theirs; null draws one for every sample."""
    augment: AugmentConfig = AugmentConfig()
    """What else is changed in samples that are trained on; held-out ones stay as they are."""
    scenes: Count = 40
    """Samples that evaluation looks at, of the sizes that are trained on; a quarter as many of the other one."""
    scene_seed: Annotated[int, Field(ge=0)] = 0
    """From which these are drawn, and the noise in which grasps are found for them."""

    def wanted(self) -> tuple[DataFile, ...]:
        """The published files that are named."""
        return tuple(file for file in self.files if file.name in (self.file, self.boxes))

    def draws_samples(self) -> bool:
        """Clouds and the choice of grasps are drawn."""
        return True

    def outline(self, batch_size: int) -> SourceOutline | None:
        """Returns the shapes of scenes with the LEAP hand; None for the synthetic one."""
        if self.synthetic:
            return None
        batch = {
            "grasp": TensorOutline((batch_size, self.grasps, GRASP_NUMBERS)),
            "edge": TensorOutline((batch_size,)),
            "cloud": TensorOutline((batch_size, self.points, 3)),
            "turn": TensorOutline((batch_size, 3, 3)),
        }
        if self.clouds is not None:
            batch["number"] = TensorOutline((batch_size,), "int64")
        joints = len(PARENTS)
        tables = {
            "parent": TensorOutline((joints,), "int64", PARENTS),
            "origin": TensorOutline((joints, 3)),
            "turn": TensorOutline((joints, 3, 3)),
            "axis": TensorOutline((joints, 3)),
            "keypoints": TensorOutline((HAND_KEYPOINTS,), "int64"),
            "box_link": TensorOutline((HAND_BOXES,), "int64"),
            "box_turn": TensorOutline((HAND_BOXES, 3, 3)),
            "box_centre": TensorOutline((HAND_BOXES, 3)),
            "box_half": TensorOutline((HAND_BOXES, 3)),
            "lower": TensorOutline((GRASP_NUMBERS,)),
            "upper": TensorOutline((GRASP_NUMBERS,)),
        }
        return SourceOutline(batch, tables=tables)

    def implementation(self) -> type[CubeGrasps]:
        """The source in torch."""
        from .cube import CubeGrasps

        return CubeGrasps
