"""Requests and responses of a served radiance field."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from runner.api import ServedRequest, ServedResponse

if TYPE_CHECKING:
    from torch import Tensor

Turns = Annotated[float, Field(ge=0, le=1)]


class ViewRequest(ServedRequest):
    """A view of an object from a camera that looks at the origin."""

    label: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Number of the class."""
    u: Turns = 0.0
    """Azimuth in turns: 0.25 is 90 degrees."""
    v: Turns = 0.35
    """Elevation, (1 - sin(elevation)) / 2: 0 is straight above, 0.5 is the horizon."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the latent vector. Views with the same seed and label show the same object."""


class ViewResponse(ServedResponse):
    """A rendered view."""

    side: int
    """Width and height in pixels."""
    rgb: str
    """Red, green and blue of all pixels, row by row, as bytes in base64."""
    classes: list[str]
    """Names of the classes that can be requested, in the order of their numbers."""


def poses_of(requests: Sequence[ViewRequest]) -> Tensor:
    """Returns u and v of requests, [B, 2]."""
    import torch

    return torch.tensor([[request.u, request.v] for request in requests])


def latents_of(requests: Sequence[ViewRequest], size: int) -> Tensor:
    """Returns normal numbers [B, size], each row from the seed of its request alone."""
    import torch

    rows = []
    # One generator for each makes a response independent of the other requests of a batch.
    for request in requests:
        generator = torch.Generator().manual_seed(request.seed)
        rows.append(torch.randn(size, generator=generator))
    return torch.stack(rows)


def responses_of(images: Tensor, classes: Sequence[str]) -> list[ViewResponse]:
    """Returns a response for each image [B, 3, H, W] from -1 to 1."""
    levels = (images.clamp(-1, 1) + 1) * 127.5
    pixels = levels.round().byte().cpu()
    # A canvas has the three colours of a pixel next to each other.
    pixels = pixels.permute(0, 2, 3, 1).contiguous()
    responses = []
    for image in pixels:
        data = image.numpy().tobytes()
        response = ViewResponse(
            side=images.shape[-1],
            rgb=base64.b64encode(data).decode("ascii"),
            classes=[*classes],
        )
        responses.append(response)
    return responses
