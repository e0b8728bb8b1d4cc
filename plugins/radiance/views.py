"""Data source of images with poses, and the evaluation of rendered views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from runner.api import DatasetSource, Learner, TensorRows, UsageError

from .alignment import best_offsets, shift_azimuth
from .camera import angles_of, camera_from_angles
from .camera_figure import draw_cameras
from .camera_scene import CameraScene
from .measures import (
    nearest_class,
    overlap,
    psnr,
    quarter_turned,
    sliced_wasserstein,
)
from .reading import lens_of, read
from .turntable import GridSection, write_gif, write_grid

if TYPE_CHECKING:
    from .config import PosedViewsConfig

Views = dict[str, Tensor]
TURNTABLE_VIEWS = 24
TURNTABLE_V = 0.35
"""Elevation of the turntable; 0.5 is the horizon."""
GRID_COLUMNS = 8
FIGURE_CLASSES = 8
"""Largest number of classes in a picture."""


class PosedViews(DatasetSource):
    """Trains on most azimuths, and compares renders with the real views of the others."""

    config: PosedViewsConfig

    def datasets(self, config: PosedViewsConfig) -> tuple[Any, Any]:
        """Returns the training views and the held-out views.

        Raises:
            UsageError: The data cannot be read, or no azimuth can be held out.
        """
        views = read(config)
        self._digest = views.digest
        self.classes = list(views.classes)
        self.sizes = {"classes": len(views.classes)}
        lens = lens_of(config)
        # Rays pass pixel centres. If colours were taken elsewhere, the optical axis is moved.
        pixel = 2 / views.image.shape[-1]
        lens[2:] += (0.5 - config.pixel_offset) * pixel
        radius = views.camera[:, :, 3].norm(dim=1).median()
        self.tables = {"lens": lens, "radius": radius}

        pose = angles_of(views.camera)
        # All elevations of an azimuth are held out: one of them would show the others.
        is_held_out = held_out_azimuths(pose[:, 0], views.label, config.held_out)
        if is_held_out.all() or not is_held_out.any():
            raise UsageError(
                f"data.held_out: no class has {config.held_out} azimuths; lower it, "
                "or add views"
            )
        pixels = views.image.to(torch.get_default_dtype())
        tables = {
            "image": pixels / 127.5 - 1,
            "label": views.label,
            "pose": pose,
            "camera": views.camera,
        }
        train = {name: table[~is_held_out] for name, table in tables.items()}
        held_out = {name: table[is_held_out] for name, table in tables.items()}
        self._class_means = class_means(
            train["image"],
            train["label"],
            len(views.classes),
        )
        return train, held_out

    def set_aside(self, held_out: Any, share: float) -> tuple[Any, Any]:
        """Returns the views of some held-out azimuths for validation, and those of the others.

        Raises:
            UsageError: No class has two held-out azimuths.
        """
        views = held_out.tensors
        rank = azimuth_ranks(views["pose"][:, 0], views["label"])
        # Evenly spread, also in classes with different numbers of azimuths.
        is_test = ((rank + 1) * share).floor() > (rank * share).floor()
        if is_test.all() or not is_test.any():
            raise UsageError(
                f"data.test: {share:g} of the held-out azimuths leave none for validation or "
                "test; hold out more with a smaller data.held_out, or remove the setting"
            )
        return (
            TensorRows({name: table[~is_test] for name, table in views.items()}),
            TensorRows({name: table[is_test] for name, table in views.items()}),
        )

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the files, or the name of synthetic data."""
        return self._digest

    # --- evaluation -----------------------------------------------------------------------

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Compares renders of held-out poses, and enlarged views, with the real views.

        Returns:
            ``swd``, the sliced Wasserstein distance to the real views; means of ``psnr`` and
            ``iou``; ``pose_control``, the share of renders that are more like the true view than
            like the one 90 degrees off, by both measures; ``label_control``, the share whose
            nearest class mean is that of their label; ``sr_psnr``, ``sr_gain`` over bicubic
            interpolation, both in dB; ``sr_residual``. If the azimuth is free, ``offset_CLASS`` in
            degrees.
        """
        metrics = super().evaluate(learner)
        batches = [*self.held_out_batches()]
        comparison = self.compared(learner, batches)
        return self.with_own_metrics(learner, metrics, comparison)

    def compared(self, learner: Learner, batches: Sequence[Views]) -> dict[str, float]:
        """Returns the metrics of renders of the poses of batches."""
        views = {
            name: torch.cat([batch[name] for batch in batches]) for name in batches[0]
        }
        views = {name: table.to(self.device) for name, table in views.items()}
        # Predictions have the batches of the recipe, and metrics need all views.
        sizes = [len(batch["label"]) for batch in batches]
        with learner.evaluating(), torch.no_grad(), self._same_latents():
            offsets = self._offsets(learner, views)
            shifted = shift_azimuth(views, turns_of(views["label"], offsets))
            render = torch.cat(
                [
                    learner.predict(learner.inputs(batch))
                    for batch in split_views(shifted, sizes)
                ]
            )

        metrics = view_metrics(render, views, self._class_means)
        overlaps = overlap(render, views["image"])
        for label in sorted(set(views["label"].tolist())):
            name = self.classes[label].replace(" ", "_")
            is_of_class = views["label"] == label
            metrics[f"iou_{name}"] = float(overlaps[is_of_class].mean())
            if label in offsets:
                metrics[f"offset_{name}"] = 360 * offsets[label]
        return metrics

    def _offsets(self, learner: Learner, views: Views) -> dict[int, float]:
        """Returns azimuth offsets in turns by label; nothing if training determines the azimuth."""
        is_free = getattr(learner, "has_free_azimuth", False)
        return best_offsets(learner, views) if is_free else {}

    @contextmanager
    def _same_latents(self) -> Iterator[None]:
        """Returns a context in which latent vectors are the same every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.context.seed)
            yield

    # --- pictures -------------------------------------------------------------------------

    @torch.no_grad()
    def render(self, learner: Learner, path: Path) -> None:
        """Draws a turntable: a GIF, or a PNG with a grid of views and with enlarged views."""
        labels = range(len(self.classes))
        with learner.evaluating(), self._same_latents():
            turntable = [self._turntable(learner, label) for label in labels]
            if path.suffix == ".gif":
                write_gif(turntable, path)
                return
            sections = [turntable_section(turntable)]
            if hasattr(learner, "enlargements"):
                sections.append(self._super_resolution_section(learner))
        write_grid(sections, path)

    def _turntable(self, learner: Learner, label: int) -> Tensor:
        """Returns views [V, 3, H, W] of one object from all sides."""
        azimuth = torch.arange(TURNTABLE_VIEWS) / TURNTABLE_VIEWS
        height = torch.full_like(azimuth, TURNTABLE_V)
        pose = torch.stack([azimuth, height], -1)
        camera = camera_from_angles(pose, float(self.tables["radius"]))
        views = {
            "label": torch.full((len(pose),), label, device=self.device),
            "pose": pose.to(self.device),
            "camera": camera.to(self.device),
        }
        inputs = learner.inputs(views)
        # All views show the same object, so they share a latent vector.
        inputs["latent"] = inputs["latent"][:1].expand_as(inputs["latent"])
        image: Tensor = learner.predict(inputs)
        return image.cpu()

    def _super_resolution_section(self, learner: Any) -> GridSection:
        """Returns small real views and small renders of held-out poses, enlarged in two ways."""
        held_out = self.held_out.take(torch.arange(len(self.held_out)))
        rows = []
        for label in range(min(FIGURE_CLASSES, len(self.classes))):
            numbers = (held_out["label"] == label).nonzero().flatten()
            middle = len(numbers) // 2
            number = numbers[middle : middle + 1]
            view = {
                name: table[number].to(self.device) for name, table in held_out.items()
            }
            inputs = learner.inputs(view)
            azimuth = view["pose"][:, 0]
            real = view["image"]
            render = learner.predict(inputs)
            small = learner.shrink(real)
            images = [
                *learner.enlargements(small, azimuth),
                real,
                *learner.enlargements(learner.render_small(inputs), azimuth),
                render,
            ]
            # Small images keep their pixels, which are drawn larger.
            size = render.shape[-2:]
            enlarged = [interpolate(image, size=size) for image in images]
            rows.append(torch.cat(enlarged).cpu())
        headers = ["small real view", "bicubic", "super-resolution", "real view"]
        headers += ["small render", "bicubic", "super-resolution", "full render"]
        title = f"Super-resolution x{learner.config.factor} of held-out poses"
        return GridSection(title, headers, rows)

    def show_data(self, learner: Learner, canvas: Any) -> None:
        """Draws the cameras, and the axes of the world and a few rays over the training images."""
        train = self.train.take(torch.arange(len(self.train)))
        position = train["camera"][:, :, 3]
        distance = float(position.norm(dim=1).median())
        scene = CameraScene(
            image=train["image"].cpu(),
            label=train["label"].cpu(),
            pose=train["pose"].cpu(),
            camera=train["camera"].cpu(),
            lens=self.tables["lens"].cpu(),
            near=getattr(learner.config, "near", 0.5 * distance),
            far=getattr(learner.config, "far", 1.5 * distance),
            pixel_offset=self.config.pixel_offset,
            classes=self.classes,
        )
        draw_cameras(scene, canvas)


def view_metrics(render: Tensor, views: Views, means: Tensor) -> dict[str, float]:
    """Returns metrics of renders of the poses of views.

    Args:
        render: [N, 3, H, W].
        views: The real views.
        means: Mean image of each class, [C, 3, H, W].
    """
    real = views["image"]
    label = views["label"]
    turned = real[quarter_turned(views["pose"], label)]
    ratio = psnr(render, real)
    overlap_with_real = overlap(render, real)

    has_higher_ratio = ratio > psnr(render, turned)
    has_more_overlap = overlap_with_real > overlap(render, turned)
    has_pose = has_higher_ratio & has_more_overlap
    has_label = nearest_class(render, means.to(render)) == label
    return {
        "swd": sliced_wasserstein(render.clamp(-1, 1), real),
        "psnr": float(ratio.mean()),
        "iou": float(overlap_with_real.mean()),
        "pose_control": float(has_pose.float().mean()),
        "label_control": float(has_label.float().mean()),
    }


def class_means(image: Tensor, label: Tensor, classes: int) -> Tensor:
    """Returns the mean image of every class, [C, 3, H, W].

    Args:
        image: [N, 3, H, W].
        label: [N].
        classes: Number of classes.
    """
    means = [image[label == number].mean(0) for number in range(classes)]
    return torch.stack(means)


def split_views(views: Views, sizes: list[int]) -> list[Views]:
    """Returns views in batches of some sizes."""
    columns = [torch.split(table, sizes) for table in views.values()]
    return [
        dict(zip(views, tables, strict=True)) for tables in zip(*columns, strict=True)
    ]


def turntable_section(turntable: Sequence[Tensor]) -> GridSection:
    """Returns evenly spaced views of a turntable, one row for each class."""
    count = len(turntable[0])
    step = max(1, count // GRID_COLUMNS)
    numbers = range(0, count, step)
    headers = [f"{360 * number / count:.0f}°" for number in numbers]
    rows = [views[list(numbers)] for views in turntable[:FIGURE_CLASSES]]
    return GridSection("Renders of one latent vector by azimuth", headers, rows)


def turns_of(label: Tensor, offsets: dict[int, float]) -> Tensor:
    """Returns the azimuth offset of each label [N], in turns."""
    turns = [offsets.get(number, 0.0) for number in label.tolist()]
    return torch.tensor(turns, device=label.device)


def held_out_azimuths(azimuth: Tensor, label: Tensor, interval: int) -> Tensor:
    """Returns which of N views are held out, [N] bool.

    Args:
        azimuth: u [N], 0 to 1.
        label: [N].
        interval: One azimuth of this many is held out in each class; at least 2.
    """
    return azimuth_ranks(azimuth, label) % interval == 0


def azimuth_ranks(azimuth: Tensor, label: Tensor) -> Tensor:
    """Returns the rank of each view's azimuth among those of its class, [N] from 0.

    Args:
        azimuth: u [N], 0 to 1.
        label: [N].
    """
    ranks = torch.zeros(len(azimuth), dtype=torch.int64, device=azimuth.device)
    # Azimuths that differ by rounding alone are the same.
    step = (azimuth * 1e5).round().long() % 100_000
    for number in range(int(label.max()) + 1):
        is_of_class = label == number
        _, rank = torch.unique(step[is_of_class], return_inverse=True)
        ranks[is_of_class] = rank
    return ranks
