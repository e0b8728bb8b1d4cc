"""The faces of the learners of grasps and of their data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

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

GRASPS = DataFile(
    name="leap_cube_grasps.npz",
    url="",
    sha256="73a6846ec7fdc1c799c3f9dd028f232e8be8f4e5cfe9d327c48a65fa26a63cb0",
    size=520_807,
    about="5,120 grasps of the LEAP hand on five cubes, held in a simulator, made from "
    "LEAP_Hand_Sim (MIT)",
)
BOXES = DataFile(
    name="leap_hand_boxes.npz",
    url="",
    sha256="533961dff8b66e9582bae83afb28bbcfa73ef9d9ddeead77a858282e62f33bf7",
    size=1_534,
    about="67 boxes of the LEAP hand's links, made from get_a_grip (MIT), which has them from "
    "dex-urdf (MIT)",
)


GRASP_NUMBERS = 25
"""Numbers that describe a grasp."""
PARENTS = (0, 1, 2, 3, 0, 5, 6, 7, 0, 9, 10, 11, 0, 13, 14, 15)
"""Links that the joints of the LEAP hand are on: four fingers with four joints each."""
HAND_KEYPOINTS = 7
HAND_BOXES = 67


class CloudEncoderConfig(GradientLearnerConfig):
    """Common settings of learners with an encoder of clouds."""

    straighten: bool = True
    """Whether clouds and grasps are rotated about z into a canonical orientation of the cloud, and
    predictions back: the network then need not learn every angle.
    """
    encoder: Literal["pointnet_lite", "pointnet2", "pyramid"] = "pointnet_lite"
    """Neighbourhoods of points, in one level, in two, or in a feature pyramid of three."""
    centres: Count = 32
    """Number of neighbourhoods: tokens that represent a cloud."""
    neighbours: Count = 16
    """Points of each."""
    width: Annotated[int, Field(ge=2, multiple_of=2)] = 128
    """Size of the vector of a token, and of a grasp between the blocks of a transformer."""


class GraspLearnerConfig(CloudEncoderConfig):
    """Common settings of learners of grasps: an encoder of clouds, and a transformer on
    sets of grasps.
    """

    sample_losses: ClassVar[bool] = True
    learns_from: ClassVar[str] = "grasps"
    # Students and models that were stored before these settings existed stay valid.
    omitted: ClassVar[frozenset[str]] = frozenset({"chamfer", "task_weights"})
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "model": {"kind": "adamw", "lr": 1.2e-3, "max_grad_norm": 1.0}
    }
    slots: ClassVar[frozenset[str]] = GradientLearnerConfig.slots | {
        "group",
        "encode",
        "restoration",
    }
    request: ClassVar[type[ServedRequest]] = GraspRequest
    response: ClassVar[type[ServedResponse]] = GraspResponse
    page: ClassVar[str] = "page"

    layers: Count = 4
    """Blocks of the transformer."""
    heads: Heads = 4
    """Attention heads of every block; they share the width among them."""
    chamfer: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the Chamfer distance between the predicted hand and that of the data, of points at
    both ends of every box, in squared decimetres. It helps where links far from the joints should
    be right; it hurts by the time of an update.
    """
    task_weights: Literal["fixed", "learned"] = "fixed"
    """Whether the errors of translations, rotations and joints have fixed weights, or weights that
    are learned with the model, from the logarithms of their variances (arXiv:1705.07115). Learned
    ones help where the fixed weights are unknown; they hurt where training errors become small,
    because their parts then outweigh the others.
    """


class GraspDiffusionConfig(GraspLearnerConfig):
    """Grasps of a hand, made from noise by a transformer that has seen the object as a cloud of
    points.

    It learns to predict from a noisy grasp the clean one (DDPM, arXiv:2006.11239; DiT,
    arXiv:2212.09748), for a set of grasps together, and repeats that prediction while
    the noise is removed.

    When it helps: there are many good answers, and their mean is none.
    When it hurts: an answer takes as many evaluations of the network as there are steps.
    """

    kind: ClassVar[str] = "grasp_diffusion"
    implementation = ".learner:GraspDiffusion"
    answering: ClassVar[frozenset[str]] = frozenset(
        {"condition", "both", "sample"}
    )
    slots: ClassVar[frozenset[str]] = GraspLearnerConfig.slots | answering
    request: ClassVar[type[ServedRequest]] = DiffusionRequest

    process: Literal["ddpm", "flow"] = "ddpm"
    """How noise is mixed in: so that the variance stays, or on a straight line (rectified flow)."""
    schedule: Literal["cosine", "linear_seed"] = "cosine"
    """The noise schedule of ``ddpm``. ``linear_seed`` never reaches pure noise, from
    which sampling starts nevertheless.
    """
    steps: Annotated[int, Field(ge=2, le=1000)] = 100
    """Levels of noise."""
    min_snr: Annotated[float, Field(gt=0)] | None = 1.0
    """The signal-to-noise ratio from which a noise level has its full weight; levels with more
    noise have less weight, because they contain little information (Min-SNR, arXiv 2303.09556).
    null gives all levels the same weight.
    """
    sampler: Annotated[
        Literal["ddpm", "ddim"], Field(validate_default=True)
    ] = "ddpm"
    """Whether fresh noise is added while it is taken out."""
    sampling_steps: Count = 100
    """Number of noise levels at which ``ddim`` evaluates the network."""
    eta: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How much fresh noise ``ddim`` adds in every step: none, up to as much as ``ddpm``."""
    guidance: Annotated[float, Field(ge=0)] = 0.0
    """Strength of classifier-free guidance, which moves predictions away from those without a
    cloud; 0 needs one evaluation per step.
    """
    unconditional: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the training sets that are shown no cloud, as guidance needs it."""

    @field_validator("sampling_steps")
    @classmethod
    def _within_the_steps(
        cls, sampling_steps: int, info: ValidationInfo
    ) -> int:
        if sampling_steps > (steps := info.data.get("steps", sampling_steps)):
            raise ValueError(f"should be at most the {steps} steps")
        return sampling_steps

    @field_validator("sampler")
    @classmethod
    def _fits_the_process(cls, sampler: str, info: ValidationInfo) -> str:
        if sampler == "ddpm" and info.data.get("process") == "flow":
            raise ValueError(
                "'ddpm' has no meaning on a straight line: take 'ddim'"
            )
        return sampler

    @field_validator("eta")
    @classmethod
    def _has_a_variance(cls, eta: float, info: ValidationInfo) -> float:
        if eta and info.data.get("process") == "flow":
            raise ValueError(
                "should be 0 on a straight line, which no noise is added to"
            )
        return eta


class GraspLatentConfig(GraspDiffusionConfig):
    """Grasps of a hand, made from noise in the latent space of an autoencoder (latent diffusion,
    Rombach et al. 2022, arXiv:2112.10752).

    The autoencoder of single grasps and the transformer, which denoises latent vectors, are trained
    together, by separate losses: that of the transformer does not change latent vectors. All
    samplers, and stages of ``grasp_diffusion``, work in the latent space.

    When it helps: numbers of a grasp that depend on each other, so that fewer describe it, and
    errors that matter differently. No gain was measured for cubes.
    When it hurts: grasps are never more accurate than reconstructions of the autoencoder, and
    latent vectors change while the transformer learns to predict them: 0.518 strict grasps instead
    of 0.581 after 2,000 updates (experiments/grasp_parts).
    """

    kind: ClassVar[str] = "grasp_latent"
    implementation = ".latent:GraspLatent"

    latent: Annotated[int, Field(ge=2)] = 20
    """Numbers of a latent vector. A grasp has 25, of which three are redundant: those of the
    rotation are two columns of a matrix.
    """
    latent_noise: Annotated[float, Field(ge=0)] = 0.1
    """Standard deviation of the noise that is added to latent vectors, whose numbers have a mean
    square of one, before the decoder in training: it then maps similar latent vectors to similar
    grasps.
    """


class GraspCvaeConfig(GraspLearnerConfig):
    """Grasps of a hand in one step, from a few numbers of chance (a conditional VAE, Sohn et al.
    2015).

    When it helps: a prediction is needed immediately.
    When it hurts: it also predicts the mean of two good grasps.
    """

    kind: ClassVar[str] = "grasp_cvae"
    implementation = ".cvae:GraspCvae"
    depends_on_progress: ClassVar[bool] = True

    latent: Count = 32
    """Numbers of chance."""
    divergence: Annotated[float, Field(ge=0)] = 0.2
    """Weight of the divergence from a normal distribution."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Share of the training in which that weight grows from zero."""


class CloudContrastiveConfig(CloudEncoderConfig):
    """Trains an encoder of clouds without grasps: it recognizes which two views are of the same
    cloud, among those of its batch (InfoNCE, arXiv:1807.03748; SimCLR, arXiv:2002.05709).

    A view has some of the points of a cloud, moved a little, and turned about z. A learner of
    grasps starts with the encoder's weights if its ``init_from`` names the run, and its ``encoder``
    and ``width`` are the same.

    When it helps: many clouds of many objects, and grasps for few of them.
    When it hurts: cubes of four sizes, as here: most clouds of a batch show an object of the same
    size as others, so that the encoder has to learn where points were sampled. No gain of
    strict grasps beyond its interval was measured (experiments/grasp_parts).
    """

    kind: ClassVar[str] = "cloud_contrastive"
    implementation = ".contrastive:CloudContrastive"
    learns_from: ClassVar[str] = "clouds"
    # Every cloud of a batch is compared with all others.
    couples_samples: ClassVar[bool] = True
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "model": {"kind": "adamw", "lr": 1.2e-3, "max_grad_norm": 1.0}
    }

    temperature: Annotated[float, Field(gt=0)] = 0.1
    """By which similarities are divided."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Share of the points that a view has, at least as many as the neighbourhoods need."""
    jitter_mm: Annotated[float, Field(ge=0)] = 1.0
    """Standard deviation of the noise on every coordinate of a point, in millimetres."""
    degrees: Annotated[float, Field(ge=0, le=180)] = 180.0
    """Largest angle of a view about z, in either direction."""


class AugmentConfig(Config):
    """Augmentation of training samples."""

    jitter_mm: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the noise on every coordinate of a point, in millimetres."""
    degrees: Annotated[float, Field(ge=0, le=180)] = 0.0
    """How far cloud and grasps are turned together at most: about z, or with ``frame: random``
    about any axis.
    """


class TableConfig(Config):
    """A round table under the object, on which clouds have points, too."""

    radius_mm: Annotated[float, Field(gt=0, le=2000)] = 150.0
    """Radius of the table in millimetres; the object stands on its middle."""
    object_share: Annotated[float, Field(gt=0, lt=1)] | None = 0.6
    """Share of a cloud's points that lie on the object, selected by its mask. null selects all
    points alike: a third of them lie on a cube of 80 mm on a table with the default radius.
    """
    scene_points: Annotated[int, Field(ge=32, le=100_000)] = 2048
    """Number of points that are sampled from a scene; a cloud is a selection of them."""


class CubeGraspsConfig(PublishedDatasetConfig):
    """Grasps of the LEAP hand on cubes of five sizes, which a simulator has held, and clouds of
    points on the cubes.

    A sample is a newly sampled cloud and a few grasps of that cube. One size is never used for
    training; of the others a tenth is held out. The evaluation samples grasps and measures them:
    **valid** ones penetrate at most 5 mm into the cube and have two links within 5 mm, **strict**
    ones at most 2 mm and three links, both with all joints within their limits; **q1** is the
    largest disturbance that contacts resist (Ferrari and Canny 1992). With ``synthetic: true`` a
    hand and its grasps are generated.
    """

    kind: ClassVar[str] = "cube_grasps"
    implementation = ".cube:CubeGrasps"
    provides: ClassVar[str] = "grasps"
    headline: ClassVar[tuple[str, ...]] = ("strict", "valid", "diversity_mm")
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        **dict.fromkeys(
            ("*valid", "*strict", "*coverage", "*beyond_limits", "*q1"), (0, 1)
        ),
        "*_mm": (0, math.inf),
    }
    objective: ClassVar[Objective | None] = Objective(
        "strict", "maximize", margin=0.05, unit="share"
    )
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
    """How cloud and grasps are turned together: about z by any angle, or by at most 45 degrees
    either way (a cube shows no more of it, and hands come from one side); not at all; or about
    any axis.
    """
    clouds: Count | None = None
    """Number of clouds of every cube, sampled and rotated once, for all samples; null samples one
    for every sample.
    """
    augment: AugmentConfig = AugmentConfig()
    """Augmentation of training samples; held-out ones are unchanged."""
    table: TableConfig | None = None
    """Clouds of objects that stand on a table; null shows objects alone. Grasps are measured
    without the table. Set ``model.straighten: false`` with it: the orientation of a cloud is
    computed from its farthest points, and those of a round table have none.
    """
    scenes: Count = 40
    """Samples that evaluation looks at, of the sizes that are trained on; a quarter as many of
    the other one.
    """
    scene_seed: Annotated[int, Field(ge=0)] = 0
    """From which these are drawn, and the noise in which grasps are found for them."""

    @field_validator("table")
    @classmethod
    def _shows_both(
        cls, table: TableConfig | None, info: ValidationInfo
    ) -> TableConfig | None:
        points = info.data.get("points")
        if table is None or points is None:
            return table
        if table.scene_points < points:
            raise ValueError(
                f"scene_points should be at least the {points:,} points of a cloud"
            )
        share = table.object_share
        if share is not None and not 0 < round(points * share) < points:
            raise ValueError(
                f"object_share: {share:g} of {points:,} points leaves none on the object or "
                f"none on the table"
            )
        return table

    def wanted(self) -> tuple[DataFile, ...]:
        """The published files that are named."""
        return tuple(
            file for file in self.files if file.name in (self.file, self.boxes)
        )

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
            "joint_lower": TensorOutline((joints,)),
            "joint_upper": TensorOutline((joints,)),
            "lower": TensorOutline((GRASP_NUMBERS,)),
            "upper": TensorOutline((GRASP_NUMBERS,)),
        }
        return SourceOutline(batch, tables=tables)


class ShapeGraspsConfig(CubeGraspsConfig):
    """Grasps of the LEAP hand on cuboids, cylinders, hexagonal prisms and capsules, for learners
    that have to grasp objects of unseen shapes.

    There are no data of such grasps: those of a shape are the grasps of ``cube_grasps``, moved
    along z and turned by a quarter, that are **strict** on the shape. They are checked by geometry,
    **not by a simulator**, so that some of them may not hold the object. Cuboids and cylinders are
    trained on; other ones of these kinds are held out; hexagonal prisms and capsules are never
    trained on (``unseen_...``). Samples and metrics are those of ``cube_grasps``. With
    ``synthetic: true`` the hand and its grasps of cubes are generated.
    """

    kind: ClassVar[str] = "shape_grasps"
    implementation = ".shape_grasps:ShapeGrasps"
    headline: ClassVar[tuple[str, ...]] = (
        "strict",
        "unseen_strict",
        "diversity_mm",
    )

    shapes: Annotated[int, Field(ge=2, le=1000)] = 36
    """Number of shapes that are trained on; a third as many are held out, and as many again have
    unseen kinds.
    """
    shape_seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the extents of all shapes."""
    smallest_mm: Annotated[float, Field(ge=10, le=200)] = 50.0
    """Least extent of a shape along every axis, in millimetres."""
    largest_mm: Annotated[
        float, Field(ge=10, le=200, validate_default=True)
    ] = 95.0
    """Largest extent; corners of a hexagonal prism are a little farther."""

    @field_validator("largest_mm")
    @classmethod
    def _exceeds_the_smallest(
        cls, largest: float, info: ValidationInfo
    ) -> float:
        smallest = info.data.get("smallest_mm", 0.0)
        if largest <= smallest:
            raise ValueError(f"should exceed smallest_mm ({smallest:g})")
        return largest

    @property
    def held_out_shapes(self) -> int:
        """Number of held-out shapes, and of those of unseen kinds."""
        return max(2, self.shapes // 3)

    def outline(self, batch_size: int) -> SourceOutline | None:
        """Returns the shapes of scenes with the LEAP hand; None for the synthetic one."""
        outline = super().outline(batch_size)
        if outline is None:
            return None
        batch = dict(outline.batch)
        del batch["edge"]
        batch["shape"] = TensorOutline((batch_size, 4))
        return replace(outline, batch=batch)


class CubeCloudsConfig(CubeGraspsConfig):
    """The clouds of ``cube_grasps``, for learners that need no grasps.

    Samples and their division are the same; the evaluation is that of the learner.
    """

    kind: ClassVar[str] = "cube_clouds"
    implementation = ".clouds:CubeClouds"
    provides: ClassVar[str] = "clouds"
    headline: ClassVar[tuple[str, ...]] = ("loss", "recognized")
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"recognized": (0, 1)}
    # The loss on held-out samples.
    objective: ClassVar[Objective | None] = None
