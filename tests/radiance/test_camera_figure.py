"""Figure of cameras and rays: which mistakes of poses it reports."""

import math

import pytest
import torch
from matplotlib.figure import Figure

from runner.plugins.radiance.camera import angles_of, camera_from_angles, project, rotate_azimuth, to_opengl
from runner.plugins.radiance.camera_figure import draw_cameras, ray_starts, sample_points, summary, view_numbers
from runner.plugins.radiance.camera_scene import CameraScene
from runner.plugins.radiance.config import PosedViewsConfig
from runner.plugins.radiance.consistency import crossing_share, touches_border
from runner.plugins.radiance.reading import lens_of, synthetic_views

CONFIG = PosedViewsConfig(synthetic=True)
LENS = lens_of(CONFIG)


def scene_of(camera=None, **changes):
    """The synthetic views, with other cameras or settings."""
    views = synthetic_views(CONFIG.radius, tuple(LENS.tolist()))
    camera = views.camera if camera is None else camera
    values = {
        "image": views.image.float() / 127.5 - 1,
        "label": views.label,
        "pose": angles_of(camera),
        "camera": camera,
        "lens": LENS,
        "near": 1.5,
        "far": 4.5,
        "pixel_offset": 0.5,
        "classes": list(views.classes),
    }
    return CameraScene(**{**values, **changes})


def synthetic_cameras():
    return synthetic_views(CONFIG.radius, tuple(LENS.tolist())).camera


def camera_to_world_inverted(cameras):
    rotation = cameras[:, :, :3].transpose(1, 2)
    return torch.cat([rotation, -rotation @ cameras[:, :, 3:]], -1)


def rolled(cameras):
    """Cameras that are rotated by 90 degrees about their optical axis."""
    return torch.stack([cameras[:, :, 1], -cameras[:, :, 0], cameras[:, :, 2], cameras[:, :, 3]], -1)


def mirrored(cameras):
    """Cameras at the opposite azimuths."""
    angles = angles_of(cameras)
    return camera_from_angles(torch.stack([torch.remainder(-angles[:, 0], 1), angles[:, 1]], -1), CONFIG.radius)


WRONG = {
    "opencv read as opengl": lambda cameras: to_opengl(cameras, "opencv"),
    "world to camera": camera_to_world_inverted,
    "rolled": rolled,
    "mirrored": mirrored,
    "shuffled": lambda cameras: cameras[torch.randperm(len(cameras), generator=torch.Generator().manual_seed(0))],
}


def test_correct_cameras_have_no_warning():
    lines = summary(scene_of())
    assert not any("WARNING" in line for line in lines)
    assert "100.0% of the rays through an object cross it in other images" in lines[-1]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("turn", [index / 12 for index in range(12)])
def test_a_mistake_is_reported_in_every_frame_of_the_world(name, turn):
    cameras = rotate_azimuth(synthetic_cameras(), torch.tensor(turn))
    right = scene_of(cameras)
    wrong = scene_of(WRONG[name](cameras))
    assert crossing_share(right) > 0.995
    assert any("WARNING" in line for line in summary(wrong))


@pytest.mark.parametrize(("near", "far"), [(0.1, 1.0), (3.0, 9.0), (2.6, 2.7)])
def test_rays_that_miss_the_origin_are_reported(near, far):
    (line,) = (line for line in summary(scene_of(near=near, far=far)) if "do not pass the origin" in line)
    assert line.startswith("WARNING: the rays of 288 of 288 cameras")
    assert "model.near and model.far" in line


def test_without_a_white_background_rays_are_not_counted():
    image = torch.zeros(288, 3, 32, 32)
    assert crossing_share(scene_of(image=image)) is None
    assert "rays through" not in " ".join(summary(scene_of(image=image)))
    mask = torch.zeros(2, 4, 4, dtype=torch.bool)
    mask[0, 1, 2] = True
    mask[1, 3, 2] = True
    assert touches_border(mask).tolist() == [False, True]


@pytest.mark.parametrize("seed", range(50))
def test_samples_of_a_ray_project_to_its_start(seed):
    generator = torch.Generator().manual_seed(seed)
    angles = torch.rand(4, 2, generator=generator) * 0.9 + 0.05
    scene = scene_of(
        camera_from_angles(angles, 2.5),
        image=torch.rand(4, 3, 16, 16, generator=generator) * 2 - 1,
        label=torch.zeros(4, dtype=torch.long),
        classes=["noise"],
    )
    starts = ray_starts(scene, 1)
    points = sample_points(scene, 1, starts)
    position = project(points.flatten(0, 1)[None], scene.camera[1:2], scene.lens)[0].view(*points.shape[:2], 2)
    torch.testing.assert_close(position, starts[:, None].expand_as(position), atol=1e-4, rtol=0)
    assert float(starts.abs().max()) <= 1


def test_views_of_a_row_are_of_one_class_and_at_the_azimuths_of_the_columns():
    scene = scene_of()
    for label in range(3):
        numbers = view_numbers(scene, label)
        assert scene.label[numbers].tolist() == [label] * 3
        u = scene.pose[numbers, 0]
        assert torch.remainder(u - u[0], 1).tolist() == pytest.approx([0, 1 / 12, 1 / 4], abs=1e-5)


@pytest.mark.parametrize("name", [None, "opencv read as opengl", "world to camera"])
def test_the_figure_is_drawn_with_a_title_in_the_colour_of_a_warning(name):
    cameras = synthetic_cameras()
    canvas = Figure()
    draw_cameras(scene_of(cameras if name is None else WRONG[name](cameras), pixel_offset=0.0), canvas)
    assert (canvas._suptitle.get_color() == "black") == (name is None)
    panels = [axes for part in canvas.subfigs for axes in part.axes]
    assert len(panels) == 3 + 9
    assert "offset 0 in each pixel" in panels[2].get_title()
    texts = " ".join(text.get_text() for axes in panels for text in axes.texts)
    assert ("the origin is behind" in texts) == (name is not None)


def test_the_origin_is_drawn_at_the_pixel_where_it_is():
    camera = synthetic_cameras()
    lens = lens_of(PosedViewsConfig(optical_axis=(0.25, -0.5)))
    canvas = Figure()
    draw_cameras(scene_of(camera, lens=lens), canvas)
    assert "origin (+) at pixel 20.0, 8.0" in canvas.subfigs[0].axes[2].get_title()
    assert math.isclose(float(scene_of().distance.max()), 2.5, rel_tol=1e-5)
