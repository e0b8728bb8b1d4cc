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
"""Elevation of the drawn views, if there are such: 20 degrees, which hides no axis of the world."""
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
    canvas.suptitle(
        "\n".join(lines),
        fontsize=10,
        ha="left",
        x=0.01,
        color="#d55e00" if has_warning else "black",
    )
    cameras, images = canvas.subfigures(1, 2, width_ratios=(1, 2.1))
    top_axes, side_axes, zoom_axes = cameras.subplots(3, 1)
    rows = min(LARGEST_ROWS, len(scene.classes))
    views = [view_numbers(scene, label) for label in range(rows)]

    draw_projection(scene, top_axes, (0, 1), views[0][0])
    draw_projection(scene, side_axes, (0, 2), views[0][0])
    draw_zoom(scene, zoom_axes, views[0][0])
    panels = images.subplots(len(views), len(AZIMUTH_STEPS), squeeze=False)
    for numbers, row in zip(views, panels, strict=True):
        draw_views(scene, numbers, row)
    images.supxlabel(
        "Each ray starts at a dot in the first image of its row. In the other images, its "
        "samples from near (small) to\nfar (large) must cross the same spot of the object. "
        "The cross is the origin of the world; z points up.",
        fontsize=8,
    )


def summary(scene: CameraScene) -> list[str]:
    """Returns the title: what the data are, and warnings about cameras that cannot be right."""
    count = len(scene.image)
    side = scene.image.shape[-1]
    nearest = float(scene.distance.min())
    farthest = float(scene.distance.max())
    plural = "es" if len(scene.classes) > 1 else ""
    names = ", ".join(scene.classes)
    classes = f"{len(scene.classes)} class{plural}: {names}"
    lines = [
        f"{count:,} training images of {side} x {side} pixels, {classes}",
        f"Cameras are {nearest:.3g} to {farthest:.3g} from the origin; "
        f"rays run from {scene.near:g} to {scene.far:g}.",
    ]
    blind = count - int(scene.sees_origin.sum())
    if blind:
        lines.append(
            f"{WARNING}: {blind:,} of {count:,} cameras do not see the origin. "
            "Check data.pose."
        )
    short = count - int(scene.reaches_origin.sum())
    if short:
        hint = "Check data.radius, model.near and model.far."
        lines.append(
            f"{WARNING}: the rays of {short:,} of {count:,} cameras do not pass the origin. "
            f"{hint}"
        )
    if not (blind or short):
        lines.append("The origin is in all images and on their rays.")
    share = crossing_share(scene)
    if share is not None:
        is_low = share < LEAST_CROSSING_SHARE
        hint = " Check data.pose and data.field_of_view." if is_low else ""
        prefix = f"{WARNING}: only " if is_low else ""
        lines[-1] += (
            f" {prefix}{share:.1%} of the rays through an object cross it in other images."
            f"{hint}"
        )
    return lines


def view_numbers(scene: CameraScene, label: int) -> list[int]:
    """Returns the numbers of views of a class at about one elevation, by column."""
    candidates = (scene.label == label).nonzero().flatten()
    u, v = scene.pose[candidates].unbind(1)
    first = (v - REFERENCE_V).abs().argmin()
    numbers = []
    for step in AZIMUTH_STEPS:
        rotation = torch.remainder(u - u[first] - step, 1.0)
        # The shorter of the two directions of rotation.
        angle = torch.minimum(rotation, 1 - rotation)
        distance = angle + (v - v[first]).abs()
        nearest = candidates[distance.argmin()]
        numbers.append(int(nearest))
    return numbers


def draw_projection(
    scene: CameraScene, axes: Axes, dimensions: tuple[int, int], reference: int
) -> None:
    """Draws camera positions and viewing directions, seen along one axis of the world.

    Args:
        scene: The images and cameras.
        axes: Where to draw.
        dimensions: Numbers of the horizontal and the vertical axis.
        reference: Number of the view whose rays are drawn.
    """
    horizontal, vertical = dimensions
    # Every n-th camera of a regular grid would show few of its azimuths.
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(scene.camera), generator=generator)
    cameras = scene.camera[order[:MOST_ARROWS]]
    length = 0.25 * float(scene.distance.median())
    start = cameras[:, :, 3]
    arrow = -length * cameras[:, :, 2]
    axes.quiver(
        start[:, horizontal],
        start[:, vertical],
        arrow[:, horizontal],
        arrow[:, vertical],
        angles="xy",
        scale_units="xy",
        scale=1,
        width=0.005,
        color="#0072b2",
    )
    points = sample_points(scene, reference, ray_starts(scene, reference))
    for ray, colour in zip(points, RAY_COLOURS, strict=True):
        axes.scatter(
            ray[:, horizontal],
            ray[:, vertical],
            s=3,
            color=colour,
            zorder=3,
        )
    axes.scatter([0], [0], marker="+", s=90, color="black", zorder=4)

    # All cameras are visible, and both axes have the same scale.
    position = scene.camera[:, :, 3]
    extent = 1.15 * float(position.abs().max())
    axes.set_xlim(-extent, extent)
    axes.set_ylim(-extent, extent)
    axes.set_aspect("equal")
    names = "xyz"
    axes.set_xlabel(names[horizontal])
    axes.set_ylabel(names[vertical], rotation=0)
    direction = "from above" if vertical == 1 else "from the side"
    axes.set_title(f"Cameras {direction}; arrows point along the view")


def draw_zoom(scene: CameraScene, axes: Axes, number: int) -> None:
    """Draws pixels around the origin, and the points at which their colours were taken."""
    side = scene.image.shape[-1]
    camera = scene.camera[number : number + 1]
    origin_point = torch.zeros(1, 1, 3)
    origin = project(origin_point, camera, scene.lens)[0, 0]
    # Training moves the lens instead of the pixels' centres; here, the centres are moved back.
    has_origin = bool(scene.sees_origin[number])
    centre = origin if has_origin else torch.zeros(2)
    pixel = (centre + 1) / 2 * side + (scene.pixel_offset - 0.5)
    corner = (pixel - ZOOM_PIXELS / 2).round()
    first = corner.clamp(0, side - ZOOM_PIXELS).int().tolist()
    axes.imshow(
        to_pixels(scene.image[number]),
        extent=(0, side, side, 0),
        interpolation="nearest",
    )
    for column in range(first[0], first[0] + ZOOM_PIXELS):
        for row in range(first[1], first[1] + ZOOM_PIXELS):
            axes.plot(
                column + scene.pixel_offset,
                row + scene.pixel_offset,
                "o",
                ms=3,
                color="black",
                mec="white",
            )
    if has_origin:
        axes.plot(*pixel.tolist(), "+", ms=16, mew=2, color="#d55e00")
    axes.set_xlim(first[0] - 0.1, first[0] + ZOOM_PIXELS + 0.1)
    axes.set_ylim(first[1] + ZOOM_PIXELS + 0.1, first[1] - 0.1)
    axes.grid(visible=False)
    description = "pixel centres"
    if scene.pixel_offset != 0.5:
        description = f"offset {scene.pixel_offset:g} in each pixel"
    origin_text = "the origin is not in this image"
    if has_origin:
        origin_text = f"origin (+) at pixel {pixel[0]:.1f}, {pixel[1]:.1f}"
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
        axes.imshow(
            to_pixels(scene.image[number]),
            extent=(-1, 1, 1, -1),
            interpolation="nearest",
        )
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


def draw_ray(
    scene: CameraScene, number: int, points: Tensor, axes: Axes, colour: str
) -> None:
    """Draws the samples [S, 3] of a ray that are in front of a camera."""
    camera = scene.camera[number : number + 1]
    is_visible = depths_of(points[None], camera)[0] > 0
    visible = points[is_visible]
    position = project(visible[None], camera, scene.lens)[0]
    # Dots grow from near to far. What is behind the camera is near.
    sizes = torch.linspace(3, 22, len(points))
    sizes = sizes[len(points) - len(visible) :]
    axes.scatter(
        position[:, 0],
        position[:, 1],
        s=sizes,
        color=colour,
        edgecolor="black",
        linewidth=0.3,
        zorder=3,
    )


def draw_world(scene: CameraScene, number: int, axes: Axes) -> None:
    """Draws the projections of the origin and of the axes of the world."""
    camera = scene.camera[number : number + 1]
    length = AXIS_LENGTH_SHARE * float(scene.distance[number] / scene.lens[0])
    origin_point = torch.zeros(1, 3)
    axis_ends = length * torch.eye(3)
    points = torch.cat([origin_point, axis_ends])
    # A projection of points behind the camera would be drawn upside down.
    if (depths_of(points[None], camera) <= 0).any():
        axes.text(
            0,
            0,
            "the origin is behind\nthis camera",
            ha="center",
            va="center",
            color="#d55e00",
            weight="bold",
        )
        return
    position = project(points[None], camera, scene.lens)[0]
    origin = position[0].tolist()
    for name, end in zip("xyz", position[1:].tolist(), strict=True):
        axes.annotate(
            "",
            (end[0], end[1]),
            (origin[0], origin[1]),
            arrowprops={"arrowstyle": "->", "lw": 1.4},
        )
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.75}
        axes.text(
            end[0],
            end[1],
            name,
            ha="center",
            va="center",
            bbox=box,
            fontsize=9,
            clip_on=True,
        )
    axes.plot(*origin, "+", ms=12, mew=2, color="black")


def ray_starts(scene: CameraScene, number: int) -> Tensor:
    """Returns positions [3, 2] in an image: the top, the left and the middle of its object."""
    side = scene.image.shape[-1]
    positions = pixel_positions(side, side)
    # In an image without an object, rays start at its borders.
    is_object = silhouette(scene.image[number : number + 1]).flatten()
    if is_object.any():
        positions = positions[is_object]
    x, y = positions.unbind(1)
    middle = positions.mean(0)
    top = positions[y.argmin()]
    leftmost = positions[x.argmin()]
    extremes = torch.stack([top, leftmost, middle])
    # A little inside of the silhouette, where a view from elsewhere shows the same surface.
    return middle + 0.85 * (extremes - middle)


def sample_points(scene: CameraScene, number: int, positions: Tensor) -> Tensor:
    """Returns the samples [R, S, 3] of the rays through positions [R, 2] of an image."""
    camera = scene.camera[number : number + 1]
    origin, direction = rays(camera, positions[None], scene.lens)
    middle = torch.full((len(positions), RAY_SAMPLES), 0.5)
    depths = stratified_depths(scene.near, scene.far, middle)
    offset = direction[0, :, None] * depths[..., None]
    return origin[0, :, None] + offset


def elevation(v: float) -> float:
    """Returns the angle above the horizon in degrees."""
    sine = max(-1.0, min(1.0, 1 - 2 * v))
    return math.degrees(math.asin(sine))


def to_pixels(image: Tensor) -> Any:
    """Returns an image [3, H, W] from -1 to 1 as an array [H, W, 3] from 0 to 1."""
    levels = (image.clamp(-1, 1) + 1) / 2
    return levels.permute(1, 2, 0).numpy()
