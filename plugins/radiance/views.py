"""Data source of images with poses, and the evaluation of rendered views."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from runner.api import Context, DatasetSource, Learner, UsageError

from .alignment import best_offsets, shift_azimuth
from .camera import angles_of, camera_from_angles
from .camera_figure import draw_cameras
from .camera_scene import CameraScene
from .learner import psnr
from .measures import nearest_class, overlap, quarter_turned, sliced_wasserstein
from .reading import SYNTHETIC, lens_of, read
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
_log = logging.getLogger(__name__)


class PosedViews(DatasetSource):
    """Trains on most azimuths, and compares renders with the real views of the others."""

    config: PosedViewsConfig

    def __init__(self, config: PosedViewsConfig, context: Context) -> None:
        super().__init__(config, context)
        if config.synthetic:
            _log.warning(
                "data.synthetic: %s are rendered; their figures cannot be compared with those of real images",
                SYNTHETIC,
            )

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
        # Rays pass pixel centres. If colours were taken elsewhere, the optical axis is moved instead.
        lens[2:] += (0.5 - config.pixel_offset) * 2 / views.image.shape[-1]
        radius = views.camera[:, :, 3].norm(dim=1).median()
        self.tables = {"lens": lens, "radius": radius}

        pose = angles_of(views.camera)
        is_held_out = held_out_azimuths(pose[:, 0], views.label, config.held_out)
        if is_held_out.all() or not is_held_out.any():
            raise UsageError(f"data.held_out: no class has {config.held_out} azimuths; lower it, or add views")
        tables = {
            "image": views.image.to(torch.get_default_dtype()) / 127.5 - 1,
            "label": views.label,
            "pose": pose,
            "camera": views.camera,
        }
        train = {name: table[~is_held_out] for name, table in tables.items()}
        held_out = {name: table[is_held_out] for name, table in tables.items()}
        labels = range(len(views.classes))
        self._class_means = torch.stack([train["image"][train["label"] == label].mean(0) for label in labels])
        return train, held_out

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the files, or the name of synthetic data."""
        return self._digest

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Compares renders of held-out poses with the real views, and enlarged views with the real ones.

        Returns:
            ``swd``, the sliced Wasserstein distance to the real views; means of ``psnr`` and ``iou``;
            ``pose_control``, the share of renders that are more like the true view than like the one 90 degrees off,
            by both measures; ``label_control``, the share whose nearest class mean is that of their label; ``sr_psnr``,
            ``sr_gain`` over bicubic interpolation, both in dB; ``sr_residual``. If the azimuth is free,
            ``offset_CLASS`` in degrees.
        """
        batches = [*self.held_out_batches()]
        return self.with_own_metrics(learner, super().evaluate(learner), self.compared(learner, batches))

    def rehearse(self, learner: Learner, batch: Any) -> dict[str, float]:
        """Evaluates one held-out batch."""
        first = next(iter(self.held_out_batches()))
        return self.with_own_metrics(learner, super().rehearse(learner, batch), self.compared(learner, [first]))

    def compared(self, learner: Learner, batches: Sequence[Views]) -> dict[str, float]:
        """Returns the metrics of renders of the poses of batches."""
        with learner.evaluating(), torch.no_grad(), self._same_latents():
            batches = [{name: table.to(self.device) for name, table in batch.items()} for batch in batches]
            views = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
            offsets = self._offsets(learner, views)
            shifted = [shift_azimuth(batch, turns_of(batch["label"], offsets)) for batch in batches]
            render = torch.cat([learner.predict(learner.inputs(batch)) for batch in shifted])
        metrics = view_metrics(render, views, self._class_means)
        overlaps = overlap(render, views["image"])
        for label in sorted(set(views["label"].tolist())):
            name = self.classes[label].replace(" ", "_")
            metrics[f"iou_{name}"] = float(overlaps[views["label"] == label].mean())
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

    # --- pictures -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def render(self, learner: Learner, path: Path) -> None:
        """Draws a turntable: a GIF, or a PNG with a grid of views and with enlarged views beside the real ones."""
        with learner.evaluating(), self._same_latents():
            turntable = [self._turntable(learner, label) for label in range(len(self.classes))]
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
        pose = torch.stack([azimuth, torch.full_like(azimuth, TURNTABLE_V)], -1)
        views = {
            "label": torch.full((len(pose),), label, device=self.device),
            "pose": pose.to(self.device),
            "camera": camera_from_angles(pose, float(self.tables["radius"])).to(self.device),
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
        factor = 1
        for label in range(min(FIGURE_CLASSES, len(self.classes))):
            numbers = (held_out["label"] == label).nonzero().flatten()
            middle = numbers[len(numbers) // 2 : len(numbers) // 2 + 1]
            view = {name: table[middle].to(self.device) for name, table in held_out.items()}
            inputs = learner.inputs(view)
            render = learner.predict(inputs)
            azimuth = view["pose"][:, 0]
            real_versions = learner.enlargements(learner.shrink(view["image"]), azimuth)
            render_versions = learner.enlargements(learner.render_small(inputs), azimuth)
            images = [*real_versions, view["image"], *render_versions, render]
            side = render.shape[-1]
            factor = side // real_versions[0].shape[-1]
            rows.append(torch.cat([interpolate(image, size=(side, side)) for image in images]).cpu())
        headers = ["small real view", "bicubic", "super-resolution", "real view"]
        headers += ["small render", "bicubic", "super-resolution", "full render"]
        return GridSection(f"Super-resolution x{factor} of held-out poses", headers, rows)

    def show_data(self, learner: Learner, canvas: Any) -> None:
        """Draws the cameras, and the axes of the world and a few rays over the training images."""
        train = self.train.take(torch.arange(len(self.train)))
        distance = float(train["camera"][:, :, 3].norm(dim=1).median())
        scene = CameraScene(
            **{name: train[name].cpu() for name in ("image", "label", "pose", "camera")},
            lens=self.tables["lens"].cpu(),
            near=getattr(learner.config, "near", 0.5 * distance),
            far=getattr(learner.config, "far", 1.5 * distance),
            pixel_offset=self.config.pixel_offset,
            classes=self.classes,
        )
        draw_cameras(scene, canvas)


def view_metrics(render: Tensor, views: Views, class_means: Tensor) -> dict[str, float]:
    """Returns metrics of renders [N, 3, H, W] of the poses of views."""
    real = views["image"]
    label = views["label"]
    turned = real[quarter_turned(views["pose"], label)]
    is_nearer = psnr(render, real) > psnr(render, turned)
    is_nearer &= overlap(render, real) > overlap(render, turned)
    nearest = nearest_class(render, class_means.to(render))
    return {
        "swd": sliced_wasserstein(render.clamp(-1, 1), real),
        "psnr": float(psnr(render, real).mean()),
        "iou": float(overlap(render, real).mean()),
        "pose_control": float(is_nearer.float().mean()),
        "label_control": float((nearest == label).float().mean()),
    }


def turntable_section(turntable: Sequence[Tensor]) -> GridSection:
    """Returns evenly spaced views of a turntable, one row for each class."""
    count = len(turntable[0])
    numbers = range(0, count, max(1, count // GRID_COLUMNS))
    headers = [f"{360 * number / count:.0f}°" for number in numbers]
    rows = [views[list(numbers)] for views in turntable[:FIGURE_CLASSES]]
    return GridSection("Renders of one latent vector by azimuth", headers, rows)


def turns_of(label: Tensor, offsets: dict[int, float]) -> Tensor:
    """Returns the azimuth offset of each label [N], in turns."""
    return torch.tensor([offsets.get(number, 0.0) for number in label.tolist()], device=label.device)


def held_out_azimuths(azimuth: Tensor, label: Tensor, interval: int) -> Tensor:
    """Returns which of N views are held out, [N] bool.

    Args:
        azimuth: u [N], 0 to 1.
        label: [N].
        interval: One azimuth of this many is held out in each class; at least 2.
    """
    is_held_out = torch.zeros(len(azimuth), dtype=torch.bool)
    # Azimuths that differ by rounding alone are the same.
    step = (azimuth * 1e5).round().long() % 100_000
    for number in range(int(label.max()) + 1):
        is_of_class = label == number
        _, rank = torch.unique(step[is_of_class], return_inverse=True)
        is_held_out[is_of_class] = rank % interval == 0
    return is_held_out
