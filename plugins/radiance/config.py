"""Settings of the radiance-field GAN and of images with poses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from runner.api import (
    DataFile,
    DataName,
    LearnerConfig,
    Objective,
    PublishedDatasetConfig,
    RecipePath,
    ServedRequest,
    ServedResponse,
    SourceOutline,
    TensorOutline,
)

from ..settings import Count
from .served import ViewRequest, ViewResponse

VIEWS = DataFile(
    name="views.npz",
    url="",
    sha256="5d272e888a06fcbe8cc55784403ff6a516cef28fa194893096a3690a59bac6bb",
    size=1_428_332,
    about="864 rendered views of three objects (public domain, MIT, zlib) with their poses",
)


VIEWS_SIDE, VIEWS_CLASSES, VIEWS_COUNT = 64, 3, 864
"""Of the published file."""


def _check_distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("should name each condition once")
    return names


class RadianceGanConfig(LearnerConfig):
    """Objects in three dimensions, learned from images of one class each with known poses.

    A generator renders patches of a conditional radiance field along rays, and a discriminator
    compares them with patches of real images at the same places (GRAF, arXiv 2007.02442). A third
    network enlarges images.

    When it helps: some hundred images of each class with their poses, and views are wanted that no
    image has.
    When it hurts: one object with many images, which a radiance field without a discriminator fits
    better.
    """

    kind: ClassVar[str] = "radiance_gan"
    implementation = ".learner:RadianceGan"
    learns_from: ClassVar[str] = "posed_images"
    roles: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "discriminator": {"kind": "adam", "lr": 5e-4, "betas": (0.0, 0.9)},
        "generator": {"kind": "adam", "lr": 1e-3, "betas": (0.0, 0.9)},
        "super_resolution": {"kind": "adam", "lr": 1e-3},
    }
    slots: ClassVar[frozenset[str]] = frozenset(
        {
            *("render", "render_rays", "render_chunk", "image_rays"),
            *("judge", "judge_pair", "gradient_penalty", "enlarge"),
            *("discriminator_step", "generator_step", "sr_step", "forward_backward"),
        }
    )
    answering: ClassVar[frozenset[str]] = frozenset({"image_rays"})
    depends_on_progress: ClassVar[bool] = True
    request: ClassVar[type[ServedRequest]] = ViewRequest
    response: ClassVar[type[ServedResponse]] = ViewResponse
    page: ClassVar[str] = "page"
    prediction_batch: ClassVar[int] = 4
    objective: ClassVar[Objective] = Objective(
        "swd", "minimize", margin=20.0, unit="1e-3"
    )

    width: Count = 64
    """Of the layers of the radiance field."""
    layers: Annotated[int, Field(ge=2)] = 4
    """Of the radiance field up to the density."""
    latent: Count = 32
    """Numbers of the latent vector of shapes, and of that of appearances."""
    samples: Annotated[int, Field(ge=2)] = 24
    """Samples along each ray, one in each of as many intervals."""
    importance_samples: Annotated[int, Field(ge=0)] = 0
    """More samples where a first pass found something (NeRF, arXiv 2003.08934, section 5.2); 0
    makes one pass.
    """
    patch: Annotated[int, Field(ge=8, multiple_of=4)] = 16
    """Side of a patch, in rays."""
    ray_chunk: Count = 512
    """Rays of all images of a batch that are rendered together. The gradient is the sum over
    chunks, so other chunks round otherwise."""
    condition: Annotated[
        tuple[Literal["class", "pose", "position"], ...],
        Field(min_length=1),
        AfterValidator(_check_distinct),
    ] = ("class", "pose", "position")
    """Inputs of the discriminator besides a patch: its class, the pose of its image, and where
    in the image its pixels are (EpiGRAF, arXiv 2206.10535). GRAF's discriminator has none of
    them."""
    latent_mean: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Mean of latent vectors. They are multiplied by the embedding of the class, so around 0 the
    sign of a product is independent of the class."""
    latent_deviation: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.3
    """Standard deviation of latent vectors; 0 renders the same object for every latent vector."""
    patch_scale: Literal["annealed", "beta"] = "annealed"
    """Distribution of the sizes of patches: uniform above a bound that falls from 1; or a beta
    distribution whose parameter grows (EpiGRAF, arXiv 2206.10535).
    """
    least_scale: Annotated[float, Field(gt=0, le=1)] = 0.25
    """The smallest side of a patch in the end, as a share of the image's."""
    density_noise: Annotated[float, Field(ge=0)] = 1.0
    """Standard deviation of the noise of densities at first; it falls to 0 in the first
    quarter.
    """
    r1: Annotated[float, Field(ge=0)] = 10.0
    """Weight of the penalty of the discriminator's gradient (R1, arXiv 1801.04406)."""
    near: Annotated[float, Field(gt=0)] = 1.5
    """Distance from the camera at which rays start."""
    far: Annotated[float, Field(gt=0)] = 4.5
    """Distance from the camera at which rays end, on white."""
    factor: Literal[2, 4] = 4
    """By how much super-resolution enlarges."""
    sectors: Count = 8
    """Directions of view for which super-resolution learns a separate image."""
    gradient: Literal["full", "cut"] = "full"
    """``cut`` computes super-resolution without a gradient, and the runner refuses to train it."""


class PosedViewsConfig(PublishedDatasetConfig):
    """Square images with the poses from which they were taken.

    An ``.npz`` has ``image`` [N, H, W, 3] in bytes or [classes, elevations, azimuths, H, W, 3] with
    ``elevation_v`` and ``class_name``. A folder has images and ``poses.csv``: a column ``file``, a
    column ``label`` if there are several classes, and the pose. Evaluation renders held-out poses.
    ``swd`` is the sliced Wasserstein distance to the real images of these poses, times 1,000.
    """

    kind: ClassVar[str] = "posed_views"
    implementation = ".views:PosedViews"
    provides: ClassVar[str] = "posed_images"
    headline: ClassVar[tuple[str, ...]] = (
        "swd",
        "psnr",
        "iou",
        "pose_control",
        "label_control",
        "sr_gain",
    )
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        **dict.fromkeys(("iou*", "*_control"), (0, 1)),
        "swd": (0, math.inf),
    }
    files: ClassVar[tuple[DataFile, ...]] = (VIEWS,)
    pictures: ClassVar[tuple[str, ...]] = (".gif", ".png")
    in_memory: ClassVar[bool] = True

    file: DataName = VIEWS.name
    """A path of an .npz, relative to the recipe; or the name of a file in the folders of data."""
    folder: RecipePath | None = None
    """A folder with images and ``poses.csv``, to be read instead of a file."""
    pose: Literal["angles", "opengl", "opencv", "direction"] = "angles"
    """Columns of a pose table: ``u, v`` of a camera that looks at the origin; a
    matrix from camera to world, ``m00`` to ``m23``, in axes of OpenGL or OpenCV; or a position
    and a direction, ``x, y, z, dx, dy, dz``."""
    radius: Annotated[float, Field(gt=0)] = 2.5
    """Distance of cameras from the origin, for poses that are angles."""
    field_of_view: Annotated[float, Field(gt=0, lt=180)] = 20.0
    """Of the width of an image, in degrees."""
    optical_axis: tuple[float, float] = (0.0, 0.0)
    """Where it meets an image, from -1 to 1: x from left to right, y from top to bottom."""
    pixel_offset: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Where in a pixel its colour was taken; 0.5 is the centre."""
    held_out: Annotated[int, Field(ge=2)] = 6
    """One azimuth of this many is held out in each class."""

    def wanted(self) -> tuple[DataFile, ...]:
        """The published file, if it is named."""
        is_other = self.synthetic or self.folder is not None or self.file != VIEWS.name
        return () if is_other else self.files

    def outline(self, batch_size: int) -> SourceOutline | None:
        """Returns the shapes of the published images, or those of an archive that is there."""
        path = None
        if self.folder is None and not self.synthetic:
            path = self.locate(self.file)
        if path is not None:
            from .reading import archive_size

            size = archive_size(path)
        elif self.wanted():
            size = VIEWS_COUNT, VIEWS_SIDE, VIEWS_CLASSES
        else:
            size = None
        if size is None:
            return None
        count, side, classes = size
        return SourceOutline(
            {
                "image": TensorOutline((batch_size, 3, side, side)),
                "label": TensorOutline((batch_size,), "int64"),
                "pose": TensorOutline((batch_size, 2)),
                "camera": TensorOutline((batch_size, 3, 4)),
            },
            sizes={"classes": classes},
            tables={
                "lens": TensorOutline((4,)),
                "radius": TensorOutline((), values=(self.radius,)),
            },
            epoch_samples=count - count // self.held_out,
        )
