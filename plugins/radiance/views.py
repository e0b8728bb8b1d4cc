"""Images with poses as a source, and what rendered views are worth beside them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.api import Context, DatasetSource, Learner, UsageError

from .camera import angles_of, camera_from_angles
from .learner import psnr
from .measures import nearest_class, overlap, quarter_turned, sliced_wasserstein
from .reading import SYNTHETIC, lens_of, read
from .turntable import draw_turntable

if TYPE_CHECKING:
    from .config import PosedViewsConfig

TURNTABLE_VIEWS, TURNTABLE_V = 24, 0.35
_log = logging.getLogger(__name__)


class PosedViews(DatasetSource):
    """Trains on most azimuths, and measures renders from the others."""

    config: PosedViewsConfig

    def __init__(self, config: PosedViewsConfig, context: Context) -> None:
        super().__init__(config, context)
        if config.synthetic:
            _log.warning("data.synthetic: %s are rendered; figures mean nothing beside those of real images", SYNTHETIC)

    def datasets(self, config: PosedViewsConfig) -> tuple[Any, Any]:
        """Views by azimuth: every so many-th of a class is held out."""
        views = read(config)
        self._digest = views.digest
        self.classes = list(views.classes)
        self.sizes = {"classes": len(views.classes)}
        lens = lens_of(config)
        # A pixel's colour belongs to its centre; where it was taken elsewhere, the optical axis is moved instead.
        lens[2:] += (0.5 - config.pixel_offset) * 2 / views.image.shape[-1]
        self.tables = {"lens": lens}
        is_held_out = held_out_azimuths(angles_of(views.camera)[:, 0], views.label, config.held_out)
        if is_held_out.all() or not is_held_out.any():
            raise UsageError(f"data.held_out: {config.held_out}: no class has so many azimuths")
        tables = {
            "image": views.image.to(torch.get_default_dtype()) / 127.5 - 1,
            "label": views.label,
            "pose": angles_of(views.camera),
            "camera": views.camera,
        }
        train = {name: table[~is_held_out] for name, table in tables.items()}
        self._class_means = torch.stack(
            [train["image"][train["label"] == each].mean(0) for each in range(len(views.classes))]
        )
        return train, {name: table[is_held_out] for name, table in tables.items()}

    def fingerprint(self) -> str:
        """SHA-256 of the files, or what says that there are none."""
        return self._digest

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """What renders of held-out poses are worth, and how well real images are enlarged.

        ``swd``, the sliced Wasserstein distance to the real images; ``psnr`` and ``iou``, beside the true view and in
        the mean; ``pose_control``, the share of renders that are more like the true view than like the one a quarter
        turn away, by both; ``label_control``, the share whose nearest class mean is that of their label; ``sr_psnr``,
        ``sr_gain`` over bicubic interpolation, both in dB; ``sr_residual``.
        """
        batches = [*self.held_out_batches()]
        return self.with_own_metrics(learner, super().evaluate(learner), self.compared(learner, batches))

    def rehearse(self, learner: Learner, batch: Any) -> dict[str, float]:
        """The same with a single held-out batch."""
        first = next(iter(self.held_out_batches()))
        return self.with_own_metrics(learner, super().rehearse(learner, batch), self.compared(learner, [first]))

    def compared(self, learner: Learner, batches: list[Any]) -> dict[str, float]:
        """Compares renders of the poses of batches with their images."""
        with learner.evaluating(), torch.no_grad(), self._same_latents():
            moved = [{name: table.to(self.device) for name, table in batch.items()} for batch in batches]
            render = torch.cat([learner.predict(learner.inputs(batch)) for batch in moved])
        real, label, pose = (torch.cat([batch[name] for batch in moved]) for name in ("image", "label", "pose"))
        turned = real[quarter_turned(pose, label)]
        nearer = (psnr(render, real) > psnr(render, turned)) & (overlap(render, real) > overlap(render, turned))
        nearest = nearest_class(render, self._class_means.to(render))
        shared = overlap(render, real)
        by_class = {
            f"iou_{self.classes[each]}".replace(" ", "_"): float(shared[label == each].mean())
            for each in range(len(self.classes))
            if (label == each).any()
        }
        return {
            "swd": sliced_wasserstein(render.clamp(-1, 1), real),
            "psnr": float(psnr(render, real).mean()),
            "iou": float(shared.mean()),
            "pose_control": float(nearer.float().mean()),
            "label_control": float((nearest == label).float().mean()),
            **by_class,
        }

    @contextmanager
    def _same_latents(self) -> Iterator[None]:
        """Inside, latent vectors are the same every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.context.seed)
            yield

    @torch.no_grad()
    def render(self, learner: Learner, path: Path) -> None:
        """Draws a turntable: a grid of views of every class, or all of them turning."""
        azimuth = torch.arange(TURNTABLE_VIEWS) / TURNTABLE_VIEWS
        pose = torch.stack([azimuth, torch.full_like(azimuth, TURNTABLE_V)], -1)
        rows: list[Tensor] = []
        with learner.evaluating(), self._same_latents():
            for each in range(len(self.classes)):
                batch = {
                    "label": torch.full((len(pose),), each, device=self.device),
                    "pose": pose.to(self.device),
                    "camera": camera_from_angles(pose, self.config.radius).to(self.device),
                }
                inputs = learner.inputs(batch)
                # One object, so one latent vector for all its views.
                inputs["latent"] = inputs["latent"][:1].expand_as(inputs["latent"])
                rows.append(learner.predict(inputs).cpu())
        draw_turntable(rows, path)


def held_out_azimuths(azimuth: Tensor, label: Tensor, every: int) -> Tensor:
    """Returns which of N views have every so many-th azimuth of their class, [N] bool.

    Args:
        azimuth: u [N], 0 to 1.
        label: [N].
        every: At least 2.
    """
    held_out = torch.zeros(len(azimuth), dtype=torch.bool)
    # Azimuths that differ by rounding alone are the same.
    step = (azimuth * 1e5).round().long() % 100_000
    for each in range(int(label.max()) + 1):
        own = label == each
        _, rank = torch.unique(step[own], return_inverse=True)
        held_out[own] = rank % every == 0
    return held_out
