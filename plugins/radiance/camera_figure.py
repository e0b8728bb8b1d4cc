"""Figure of cameras and rays over images, which shows a wrong pose convention before training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .camera import depths_of, pixel_positions, project, rays
from .camera_scene import CameraScene
from .consistency import crossing_share
from .measures import silhouette
from .rendering import stratified_depths

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (12.0, 8.4)
LARGEST_ROWS = 3
AZIMUTH_STEPS = (0.0, 1 / 12, 1 / 4)
"""Azimuths of the columns, in turns from the first view."""
MOST_ARROWS = 72
RAY_SAMPLES = 24
RAY_COLOURS = ("#d55e00", "#56b4e9", "#cc79a7")
"""Colours that color-blind readers can distinguish (Okabe and Ito 2008)."""
AXIS_LENGTH_SHARE = 0.6
"""Length of the drawn axes of the world, as a share of half of the visible width."""
REFERENCE_V = 0.33
"""Elevation of the drawn views, as far as the data have it: 20 degrees, at which no axis of the world is hidden."""
ZOOM_PIXELS = 6
WARNING = "WARNING"
LEAST_CROSSING_SHARE = 0.985
"""Least share of rays that cross an object in other images, too, without a warning."""


def draw_cameras(scene: CameraScene, canvas: Any) -> None:
    """Draws cameras, and the axes of the world and a few rays over images.

    Args:
        scene: The images and cameras.
        canvas: An empty matplotlib figure.
    """
    canvas.set_size_inches(*SIZE_INCHES)
    lines = summary(scene)
    has_warning = any(WARNING in line for line in lines)
    canvas.suptitle("\n".join(lines), fontsize=10, ha="left", x=0.01, color="#d55e00" if has_warning else "black")
    left, right = canvas.subfigures(1, 2, width_ratios=(1, 2.1))
    top_axes, side_axes, zoom_axes = left.subplots(3, 1)
    views = [view_numbers(scene, label) for label in range(min(LARGEST_ROWS, len(scene.classes)))]

    draw_projection(scene, top_axes, (0, 1), views[0][0])
    draw_projection(scene, side_axes, (0, 2), views[0][0])
    draw_zoom(scene, zoom_axes, views[0][0])
    panels = right.subplots(len(views), len(AZIMUTH_STEPS), squeeze=False)
    for numbers, row in zip(views, panels, strict=True):
        draw_views(scene, numbers, row)
    right.supxlabel(
        "Each ray starts at a dot in the first image of its row. In the other images, its samples from near (small) to"
        "\nfar (large) must cross the same spot of the object. The cross is the origin of the world; z points up.",
        fontsize=8,
    )


def summary(scene: CameraScene) -> list[str]:
    """Returns the title: what the data are, and warnings about cameras that cannot be right."""
    count = len(scene.image)
    side = scene.image.shape[-1]
    nearest = float(scene.distance.min())
    farthest = float(scene.distance.max())
    classes = f"{len(scene.classes)} class{'es' * (len(scene.classes) > 1)}: {', '.join(scene.classes)}"
    lines = [
        f"{count:,} training images of {side} x {side} pixels, {classes}",
        f"Cameras are {nearest:.3g} to {farthest:.3g} from the origin; rays run from {scene.near:g} to {scene.far:g}.",
    ]
    blind = count - int(scene.sees_origin.sum())
    if blind:
        lines.append(f"{WARNING}: {blind:,} of {count:,} cameras do not see the origin. Check data.pose.")
    short = count - int(scene.reaches_origin.sum())
    if short:
        hint = "Check data.radius, model.near and model.far."
        lines.append(f"{WARNING}: the rays of {short:,} of {count:,} cameras do not pass the origin. {hint}")
    if not (blind or short):
        lines.append("The origin is in all images and on their rays.")
    share = crossing_share(scene)
    if share is not None:
        is_low = share < LEAST_CROSSING_SHARE
        hint = " Check data.pose and data.field_of_view." if is_low else ""
        prefix = f"{WARNING}: only " if is_low else ""
        lines[-1] += f" {prefix}{share:.1%} of the rays through an object cross it in other images.{hint}"
    return lines


def view_numbers(scene: CameraScene, label: int) -> list[int]:
    """Returns the numbers of views of a class, at about the azimuths of the columns and one elevation."""
    candidates = (scene.label == label).nonzero().flatten()
    pose = scene.pose[candidates]
    first = pose[(pose[:, 1] - REFERENCE_V).abs().argmin()]
    numbers = []
    for step in AZIMUTH_STEPS:
        angle = torch.remainder(pose[:, 0] - first[0] - step, 1.0)
        angle = torch.minimum(angle, 1 - angle)
        distance = angle + (pose[:, 1] - first[1]).abs()
        numbers.append(int(candidates[distance.argmin()]))
    return numbers


def draw_projection(scene: CameraScene, axes: Axes, dimensions: tuple[int, int], reference: int) -> None:
    """Draws camera positions and viewing directions, seen along one axis of the world.

    Args:
        scene: The images and cameras.
        axes: Where to draw.
        dimensions: Numbers of the horizontal and the vertical axis.
        reference: Number of the view whose rays are drawn.
    """
    horizontal, vertical = dimensions
    # Every n-th camera of a regular grid would show few of its azimuths.
    order = torch.randperm(len(scene.camera), generator=torch.Generator().manual_seed(0))
    cameras = scene.camera[order[:MOST_ARROWS]]
    length = 0.25 * float(scene.distance.median())
    start = cameras[:, :, 3]
    arrow = -length * cameras[:, :, 2]
    axes.quiver(
        start[:, horizontal], start[:, vertical], arrow[:, horizontal], arrow[:, vertical],
        angles="xy", scale_units="xy", scale=1, width=0.005, color="#0072b2",
    )  # fmt: skip
    points = sample_points(scene, reference, ray_starts(scene, reference))
    for ray, colour in zip(points, RAY_COLOURS, strict=True):
        axes.scatter(ray[:, horizontal], ray[:, vertical], s=3, color=colour, zorder=3)
    axes.scatter([0], [0], marker="+", s=90, color="black", zorder=4)

    extent = 1.15 * float(scene.camera[:, :, 3].abs().max())
    axes.set_xlim(-extent, extent)
    axes.set_ylim(-extent, extent)
    axes.set_aspect("equal")
    names = "xyz"
    axes.set_xlabel(names[horizontal])
    axes.set_ylabel(names[vertical], rotation=0)
    direction = "from above" if vertical == 1 else "from the side"
    axes.set_title(f"Cameras {direction}; arrows point along the view")


def draw_zoom(scene: CameraScene, axes: Axes, number: int) -> None:
    """Draws the pixels around the origin of the world, and the points at which their colours were taken."""
    side = scene.image.shape[-1]
    origin = project(torch.zeros(1, 1, 3), scene.camera[number : number + 1], scene.lens)[0, 0]
    # Training moves the lens instead of the pixels' centres; here, the centres are moved back.
    has_origin = bool(scene.sees_origin[number])
    centre = origin if has_origin else torch.zeros(2)
    pixel = (centre + 1) / 2 * side + (scene.pixel_offset - 0.5)
    first = (pixel - ZOOM_PIXELS / 2).round().clamp(0, side - ZOOM_PIXELS).int().tolist()
    axes.imshow(to_pixels(scene.image[number]), extent=(0, side, side, 0), interpolation="nearest")
    for column in range(first[0], first[0] + ZOOM_PIXELS):
        for row in range(first[1], first[1] + ZOOM_PIXELS):
            axes.plot(column + scene.pixel_offset, row + scene.pixel_offset, "o", ms=3, color="black", mec="white")
    if has_origin:
        axes.plot(*pixel.tolist(), "+", ms=16, mew=2, color="#d55e00")
    axes.set_xlim(first[0] - 0.1, first[0] + ZOOM_PIXELS + 0.1)
    axes.set_ylim(first[1] + ZOOM_PIXELS + 0.1, first[1] - 0.1)
    axes.grid(visible=False)
    description = "pixel centres" if scene.pixel_offset == 0.5 else f"offset {scene.pixel_offset:g} in each pixel"
    origin_text = (
        f"origin (+) at pixel {pixel[0]:.1f}, {pixel[1]:.1f}" if has_origin else "the origin is not in this image"
    )
    axes.set_title(f"Colours taken at the dots ({description});\n{origin_text}")


def draw_views(scene: CameraScene, numbers: list[int], row: Any) -> None:
    """Draws rays of the first view over all views of a row.

    Args:
        scene: The images and cameras.
        numbers: Numbers of the views.
        row: Axes, one for each view.
    """
    starts = ray_starts(scene, numbers[0])
    points = sample_points(scene, numbers[0], starts)
    name = scene.classes[int(scene.label[numbers[0]])]
    for number, axes in zip(numbers, row, strict=True):
        axes.imshow(to_pixels(scene.image[number]), extent=(-1, 1, 1, -1), interpolation="nearest")
        draw_world(scene, number, axes)
        for start, ray, colour in zip(starts, points, RAY_COLOURS, strict=True):
            if number == numbers[0]:
                axes.plot(*start.tolist(), "o", ms=8, color=colour, mec="black")
            else:
                draw_ray(scene, number, ray, axes, colour)
        u, v = scene.pose[number].tolist()
        axes.set_title(f"{name}: azimuth {360 * u:.0f}°, elevation {elevation(v):.0f}°")
        axes.set_xlim(-1, 1)
        axes.set_ylim(1, -1)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[["top", "right"]].set_visible(True)


def draw_ray(scene: CameraScene, number: int, points: Tensor, axes: Axes, colour: str) -> None:
    """Draws the samples [S, 3] of a ray that are in front of a camera."""
    camera = scene.camera[number : number + 1]
    visible = points[depths_of(points[None], camera)[0] > 0]
    position = project(visible[None], camera, scene.lens)[0]
    sizes = torch.linspace(3, 22, len(points))[len(points) - len(visible) :]
    axes.scatter(position[:, 0], position[:, 1], s=sizes, color=colour, edgecolor="black", linewidth=0.3, zorder=3)


def draw_world(scene: CameraScene, number: int, axes: Axes) -> None:
    """Draws the projections of the origin and of the axes of the world."""
    camera = scene.camera[number : number + 1]
    length = AXIS_LENGTH_SHARE * float(scene.distance[number] / scene.lens[0])
    points = torch.cat([torch.zeros(1, 3), length * torch.eye(3)])
    if (depths_of(points[None], camera) <= 0).any():
        axes.text(0, 0, "the origin is behind\nthis camera", ha="center", va="center", color="#d55e00", weight="bold")
        return
    position = project(points[None], camera, scene.lens)[0]
    origin = position[0].tolist()
    for name, end in zip("xyz", position[1:].tolist(), strict=True):
        axes.annotate("", (end[0], end[1]), (origin[0], origin[1]), arrowprops={"arrowstyle": "->", "lw": 1.4})
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.75}
        axes.text(end[0], end[1], name, ha="center", va="center", bbox=box, fontsize=9, clip_on=True)
    axes.plot(*origin, "+", ms=12, mew=2, color="black")


def ray_starts(scene: CameraScene, number: int) -> Tensor:
    """Returns positions [3, 2] in an image: the top, the left and the bottom of its object."""
    side = scene.image.shape[-1]
    positions = pixel_positions(side, side)
    is_object = silhouette(scene.image[number : number + 1]).flatten()
    if is_object.any():
        positions = positions[is_object]
    middle = positions.mean(0)
    # A little inside of the silhouette, where a view from elsewhere shows the same surface.
    extremes = torch.stack([positions[positions[:, 1].argmin()], positions[positions[:, 0].argmin()], middle])
    return middle + 0.85 * (extremes - middle)


def sample_points(scene: CameraScene, number: int, positions: Tensor) -> Tensor:
    """Returns the samples [R, S, 3] of the rays through positions [R, 2] of an image."""
    origin, direction = rays(scene.camera[number : number + 1], positions[None], scene.lens)
    middle = torch.full((len(positions), RAY_SAMPLES), 0.5)
    depths = stratified_depths(scene.near, scene.far, middle)
    return origin[0, :, None] + direction[0, :, None] * depths[..., None]


def elevation(v: float) -> float:
    """Returns the angle above the horizon in degrees."""
    return math.degrees(math.asin(max(-1.0, min(1.0, 1 - 2 * v))))


def to_pixels(image: Tensor) -> Any:
    """Returns an image [3, H, W] from -1 to 1 as an array [H, W, 3] from 0 to 1."""
    return ((image.clamp(-1, 1) + 1) / 2).permute(1, 2, 0).numpy()
