"""Scikit-learn's digits in memory."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import DatasetSource, Learner, UsageError

from .config import EXTRA
from .sample_grid import COLUMNS, draw_sample_grid

if TYPE_CHECKING:
    from .config import DigitsConfig


class Digits(DatasetSource):
    """The first images are held out, the others are trained on."""

    sizes = {"classes": 10}  # noqa: RUF012 (nobody changes it)

    def datasets(self, config: DigitsConfig) -> tuple[Any, Any]:
        """Returns images [N, 1, H, W] in [0, 1] and labels [N], of both sets.

        Raises:
            UsageError: scikit-learn is not installed.
        """
        try:
            image, label = read_digits()
        except ModuleNotFoundError as error:
            raise UsageError(
                f"data.kind: 'digits' needs the package '{error.name}': {EXTRA}"
            ) from error
        held_out = config.held_out
        if config.scale > 1:
            image = F.interpolate(image, scale_factor=config.scale, mode="bilinear")
        # Copies, because the digits are cached and must not be changed.
        return (
            {"image": image[held_out:].clone(), "label": label[held_out:].clone()},
            {"image": image[:held_out].clone(), "label": label[:held_out].clone()},
        )

    def show_data(self, learner: Learner, canvas: Any) -> None:
        """Draws training images of each digit."""
        train = self.train.take(torch.arange(len(self.train)))
        images = train["image"].cpu()
        label = train["label"].cpu()
        samples = {}
        for digit in range(self.sizes["classes"]):
            numbers = (label == digit).nonzero().flatten()
            samples[str(digit)] = len(numbers), list(images[numbers[:COLUMNS]])
        size = f"{images.shape[2]} x {images.shape[3]} pixels"
        title = (
            f"digits: {len(images):,} training images of {size}, {len(self.held_out):,} "
            f"held out"
        )
        draw_sample_grid(samples, title, canvas)


@cache
def read_digits() -> tuple[Tensor, Tensor]:
    """Returns images [N, 1, 8, 8] in [0, 1] and labels [N].

    They are read once in a process: a verification builds a hundred pipelines. Nothing may change
    them in place.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("no module 'sklearn'", name="sklearn")
    # The file of ``sklearn.datasets.load_digits``, whose import takes longer than a short training.
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(path, delimiter=","))
    # The grey levels are from 0 to 16.
    images = table[:, :-1].float().reshape(-1, 1, 8, 8) / 16
    return images, table[:, -1].long()
