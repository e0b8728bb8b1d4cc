"""Clouds of points on cubes, and grasps of these cubes that a simulator has held."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from runner.api import Batch, Context, DatasetSource, Learner, UsageError

from .geometry import LIMIT_TOLERANCE, Hand, rotated, rotation_6d, yaw
from .scenes import Grasps, Scenes, TrainingScenes, scaling
from .synthetic import synthetic_grasps
from .verdicts import CHUNK, verdicts
from .wrenches import q1

if TYPE_CHECKING:
    from .config import CubeGraspsConfig

UNSEEN = 0.07875
"""The edge of the cube that is never trained on, in metres; without it, the middle one."""
HELD_OUT = 10
"""One of this number of grasps is held out."""
KEYPOINTS = (
    "palm_lower",
    "fingertip",
    "fingertip_2",
    "fingertip_3",
    "thumb_fingertip",
    "thumb_dip",
    "dip",
)
"""Links whose origins are the keypoints of a hand."""
COVERED_MM = 20.0
"""How close to a held-out grasp a sampled one has to be in the mean of its keypoints."""
Q1_GRASPS = 4
"""Grasps of a scene whose wrenches are measured: a quarter of them, because a hull takes 7 ms."""


class DividedGrasps(NamedTuple):
    """Grasps, and the numbers of those of every object in a part.

    Attributes:
        grasps: All grasps.
        train: For every object of the training, the numbers of its grasps.
        held_out: The same for held-out grasps.
        unseen: The same for objects that are unlike those of the training.
    """

    grasps: Grasps
    train: list[Tensor]
    held_out: list[Tensor]
    unseen: list[Tensor]


class SampledGrasps(NamedTuple):
    """Grasps that a learner has sampled for scenes, in the frames of their objects.

    Attributes:
        grasp: The sampled grasps, [B, G, 25] in metres and radians.
        references: The grasps of the scenes, of the same shape.
        objects: Edges of cubes [B] in metres, or shapes [B, 4].
        excess: Largest angles by which predicted joints exceeded their limits, [B, G].
    """

    grasp: Tensor
    references: Tensor
    objects: Tensor
    excess: Tensor


def read(config: CubeGraspsConfig) -> Grasps:
    """Reads the grasps of the configured files, or generates synthetic ones.

    Raises:
        UsageError: A file is missing, or its content is not grasps of this hand.
    """
    paths: list[Path] = []
    if config.synthetic:
        arrays = synthetic_grasps()
        digest = "synthetic"
    else:
        paths = [config.require(name) for name in (config.file, config.boxes)]
        arrays = {}
        contents = hashlib.sha256()
        for path in paths:
            arrays |= _arrays(path)
            contents.update(path.read_bytes())
        digest = contents.hexdigest()
    dtype = torch.get_default_dtype()
    try:
        links = ["palm_lower", *arrays["kinematics_child"].tolist()]
        rotation = torch.tensor(arrays["hand_rotation"], dtype=dtype)
        pose = [
            torch.tensor(arrays[name], dtype=dtype)
            for name in ("hand_translation", "joints")
        ]
        tables = {
            "parent": _positions(links, arrays["kinematics_parent"].tolist()),
            "origin": torch.tensor(
                arrays["kinematics_origin_xyz"], dtype=dtype
            ),
            "turn": torch.tensor(
                arrays["kinematics_origin_rotation"], dtype=dtype
            ),
            "axis": torch.tensor(arrays["kinematics_axis"], dtype=dtype),
            **_joint_limits(arrays, len(pose[1][0]), dtype),
            "keypoints": _positions(links, KEYPOINTS),
            "box_link": _positions(links, arrays["link"].tolist()),
            "box_turn": torch.tensor(arrays["rotation"], dtype=dtype),
            "box_centre": torch.tensor(arrays["center"], dtype=dtype),
            "box_half": torch.tensor(arrays["half_size"], dtype=dtype),
        }
        edge = torch.tensor(arrays["cube_edge"], dtype=dtype)
        grasp = torch.cat([*pose, rotation_6d(rotation)], 1)
        return Grasps(edge, grasp, tables, digest)
    except (KeyError, ValueError, RuntimeError) as error:
        files = " and ".join(map(str, paths))
        raise UsageError(
            f"data.file: {files}: not the grasps of this hand: {error}"
        ) from error


def _joint_limits(
    arrays: Mapping[str, Any], joints: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns the limits of the joints; infinite ones if a file has none."""
    unlimited = np.full(joints, np.inf)
    lower = arrays.get("kinematics_lower", -unlimited)
    upper = arrays.get("kinematics_upper", unlimited)
    limits = {"joint_lower": lower, "joint_upper": upper}
    for name, limit in limits.items():
        if np.shape(limit) != (joints,):
            problem = f"{name} has the shape {np.shape(limit)}"
            raise ValueError(f"{problem}, and there are {joints} joints")
    return {
        name: torch.tensor(limit, dtype=dtype) for name, limit in limits.items()
    }


def _positions(links: Sequence[str], names: Sequence[str]) -> Tensor:
    return torch.tensor([links.index(name) for name in names])


def _arrays(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(
            f"data.file: {path} is no .npz with arrays: {error or 'it is empty'}"
        ) from error


_SCENE_STRIDE = 1_000_003
"""Distance of the numbers of the first scenes of two seeds; larger than the number of scenes."""


_TEST_SEED = 2**30
"""Seed of the scenes for the test; that of the others for it is one more."""


def divided(
    rows: Sequence[Tensor], share: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Divides the grasps of every size into those for validation and those for the test.

    Args:
        rows: For every size, the numbers of grasps.
        share: Share of the grasps for the test.

    Raises:
        UsageError: A size has a single grasp.
    """
    validation = list[Tensor]()
    test = list[Tensor]()
    for numbers in rows:
        count = len(numbers)
        if count < 2:
            raise UsageError(
                "data.test: a size has one held-out grasp, too few for validation and test; "
                "remove the setting"
            )
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(count, generator=generator)
        size = min(max(1, round(share * count)), count - 1)
        validation.append(numbers[order[size:]])
        test.append(numbers[order[:size]])
    return validation, test


class CubeGrasps(DatasetSource):
    """Scenes for training, held-out scenes that are always the same, and metrics of grasps."""

    unseen: dict[str, Tensor]
    unseen_share: ClassVar[float] = 0.25
    """Scenes of unseen objects, as a share of those of the others."""
    _tested: dict[str, Tensor]
    _unseen_tested: dict[str, Tensor]

    def __init__(self, config: CubeGraspsConfig, context: Context) -> None:
        super().__init__(config, context)
        self.hand = Hand(self.tables).to(self.device)

    def datasets(self, config: CubeGraspsConfig) -> tuple[Any, Any]:
        """Returns scenes of the grasps for training, and of held-out ones."""
        grasps, train, held_out, unseen_rows = self.division(config)
        self._digest = grasps.digest
        self._key = grasps.key

        # Held-out grasps must not decide how the numbers are scaled.
        trained = torch.cat(train)
        lower, upper = scaling(grasps.grasp[trained], config.frame)
        palm = grasps.grasp[trained, :2].mean(0)
        self._azimuth = float(torch.atan2(palm[1], palm[0]))
        self.tables = {**grasps.tables, "lower": lower, "upper": upper}
        scale = torch.stack([lower, upper])

        def fixed(
            rows: Sequence[Tensor], count: int, seed: int
        ) -> dict[str, Tensor]:
            # The sequence of the recipe's seed continues as if nothing had been sampled.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + 2 * config.scene_seed)
                dataset = Scenes(grasps, rows, config, scale, count)
                scenes = dataset.__getitems__(range(count))
            # Every scene has a number, which seeds the noise of a batch that starts with it. A
            # generator reads the lowest 32 bits of a seed, so both numbers are in these.
            first = config.scene_seed * _SCENE_STRIDE % 2**31
            return {**scenes, "draw": first + torch.arange(count)}

        unseen_scenes = max(1, int(config.scenes * self.unseen_share))
        if config.test is not None:
            # A grasp may be in several scenes, so the grasps are divided and not the scenes.
            held_out, tested = self.divided(held_out, config.test)
            unseen_rows, unseen_tested = self.divided(unseen_rows, config.test)
            self._tested = fixed(tested, config.scenes, _TEST_SEED)
            self._unseen_tested = fixed(
                unseen_tested, unseen_scenes, _TEST_SEED + 1
            )
        self.unseen = fixed(unseen_rows, unseen_scenes, 2)
        training_scenes = TrainingScenes(
            grasps,
            train,
            config,
            scale,
            len(trained) // config.grasps,
            self.context.seed,
        )
        return training_scenes, fixed(held_out, config.scenes, 1)

    def division(self, config: CubeGraspsConfig) -> DividedGrasps:
        """Reads the grasps, and divides those of every size but one, which is never trained on."""
        grasps = read(config)
        edge = grasps.objects
        sizes = torch.unique(edge)
        unseen = sizes.new_tensor(-1.0)
        if len(sizes) > 1:
            unseen = sizes[(sizes - UNSEEN).abs().argmin()]

        train = list[Tensor]()
        held_out = list[Tensor]()
        for size in sizes[sizes != unseen]:
            rows = (edge == size).nonzero()[:, 0]
            # The seed is fixed, so that all runs hold out the same grasps.
            generator = torch.Generator().manual_seed(0)
            rows = rows[torch.randperm(len(rows), generator=generator)]
            count = max(1, len(rows) // HELD_OUT)
            held_out.append(rows[:count])
            train.append(rows[count:])
        unseen_rows = held_out
        if len(sizes) > 1:
            unseen_rows = [(edge == unseen).nonzero()[:, 0]]
        return DividedGrasps(grasps, train, held_out, unseen_rows)

    def divided(
        self, rows: Sequence[Tensor], share: float
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Divides numbers of grasps into those for validation and those for the test."""
        return divided(rows, share)

    def set_aside(self, held_out: Any, share: float) -> tuple[Any, Any]:
        """Returns scenes of the grasps for validation, and of those for the test."""
        return held_out, self._tested

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Uses other grasps inside the ``with``, also of the cube that is never trained on."""
        unseen = self.unseen
        with super().testing():
            self.unseen = self._unseen_tested
            try:
                yield
            finally:
                self.unseen = unseen

    def collate(self, samples: Any) -> Batch:
        """Returns scenes, which are a batch already, or collates single ones."""
        return (
            samples
            if isinstance(samples, Mapping)
            else super().collate(samples)
        )

    def fingerprint(self) -> str:
        """SHA-256 of both files."""
        return self._digest

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Returns the loss on held-out scenes, and metrics of grasps sampled for their clouds.

        ``valid`` and ``strict``, shares; ``beyond_limits``, the share in which a joint was
        predicted more than 1 degree beyond its limit, to which it was moved; ``q1``, the mean
        largest disturbance that the contacts of a grasp resist, of four grasps of a scene;
        ``penetration_mm``, in the mean; ``diversity_mm``, the mean distance of two grasps of a
        cube; ``matched_mm``, of sampled grasps and those of the scene, one to one; ``coverage``,
        the share of held-out grasps near which there is a sampled one; ``unseen_...``, the same
        for the cube that is never trained on; ``swapped_valid``, of grasps for the largest cube
        on the smallest, which is low if clouds are used.
        """
        # Sampling and measuring grasps takes long.
        size, batches = (
            (2, 1) if self.rehearsing else (self.context.batch_size, None)
        )
        sampled = self.sampled(learner, size, batches)
        return self.with_own_metrics(
            learner, super().evaluate(learner), sampled
        )

    def sampled(
        self, learner: Learner, size: int, batches: int | None
    ) -> dict[str, float]:
        """Samples for held-out scenes in batches of a size, at most ``batches`` of
        them, and measures.
        """
        held_out = self._sampled(learner, self.held_out.tensors, size, batches)
        unseen = self._sampled(learner, self.unseen, size, batches)
        metrics = self._metrics(held_out)
        for name, value in self._metrics(unseen).items():
            metrics[f"unseen_{name}"] = value

        # A network that ignores the cloud grasps a small object as wide as a large one.
        sizes = self.object_sizes(held_out.objects)
        for_largest = held_out.grasp[sizes == sizes.max()]
        smallest = held_out.objects[sizes.argmin()]
        swapped = self._close(
            for_largest, torch.stack([smallest] * len(for_largest))
        )
        return {
            **metrics,
            "swapped_valid": float(swapped["valid"].float().mean()),
        }

    def _metrics(self, sampled: SampledGrasps) -> dict[str, float]:
        metrics = self.worth(sampled.grasp, sampled.references, sampled.objects)
        exceeds = sampled.excess > LIMIT_TOLERANCE
        return {
            **metrics,
            "beyond_limits": float(exceeds.float().mean()),
            "q1": self._q1(sampled.grasp, sampled.objects),
        }

    def object_sizes(self, objects: Tensor) -> Tensor:
        """Returns numbers [B] that are larger for larger objects."""
        return objects

    def _q1(self, grasp: Tensor, objects: Tensor) -> float:
        """Returns the mean epsilon metric of the first grasps of every scene, [B, G, 25]."""
        first = grasp[:, :Q1_GRASPS]
        flat = first.flatten(0, 1)
        repeated = objects.repeat_interleave(first.shape[1], 0)
        # In chunks for the same reason as in ``verdicts``.
        chunks = zip(
            torch.split(flat, CHUNK), torch.split(repeated, CHUNK), strict=True
        )
        radii = [q1(self.hand, *chunk) for chunk in chunks]
        return float(torch.cat(radii).mean())

    def worth(
        self, grasp: Tensor, references: Tensor, objects: Tensor
    ) -> dict[str, float]:
        """Returns the metrics of grasps.

        Args:
            grasp: [B, G, 25] in the frames of their objects, in metres and radians.
            references: those of the scenes, the same.
            objects: Edges of cubes [B] in metres, or shapes [B, 4].
        """
        close = self._close(grasp, objects)
        keypoints = self.hand.keypoints_of(grasp)
        reference_keypoints = self.hand.keypoints_of(references)

        # A scene has as many grasps as are sampled: the assignment pairs each with another one.
        pair_distance = _distance_mm(
            keypoints[:, :, None], reference_keypoints[:, None]
        )
        matched = [
            float(costs[linear_sum_assignment(costs)].mean())
            for costs in pair_distance.cpu().numpy()
        ]

        diversity = list[float]()
        coverage = list[float]()
        unique, number = torch.unique(objects, dim=0, return_inverse=True)
        for position in range(len(unique)):
            sampled = keypoints[number == position].flatten(0, 1)
            count = len(sampled)
            between = _distance_mm(sampled[:, None], sampled[None])
            # The distance of a grasp to itself is zero and no pair.
            diversity.append(float(between.sum() / (count * (count - 1))))

            reference = reference_keypoints[number == position].flatten(0, 1)
            to_reference = _distance_mm(sampled[:, None], reference[None])
            is_covered = to_reference.amin(0) <= COVERED_MM
            coverage.append(float(is_covered.float().mean()))
        return {
            "valid": float(close["valid"].float().mean()),
            "strict": float(close["strict"].float().mean()),
            "penetration_mm": float(close["depth"].mean()),
            "diversity_mm": float(np.mean(diversity)),
            "matched_mm": float(np.mean(matched)),
            "coverage": float(np.mean(coverage)),
        }

    def _sampled(
        self,
        learner: Learner,
        scenes: Mapping[str, Tensor],
        size: int,
        batches: int | None,
    ) -> SampledGrasps:
        """Returns grasps for scenes, rotated back to the frames of the objects."""
        # The grasps of scenes are scaled to [-1, 1], those of a prediction are not.
        lower, upper = (
            self.tables[name].to(self.device) for name in ("lower", "upper")
        )
        grasp = list[Tensor]()
        references = list[Tensor]()
        objects = list[Tensor]()
        excess = list[Tensor]()
        count = len(scenes[self._key])
        starts = itertools.islice(range(0, count, size), batches)
        with learner.evaluating():
            for start in starts:
                batch = {
                    name: tensor[start : start + size].to(self.device)
                    for name, tensor in scenes.items()
                }
                inverse = batch["turn"].transpose(1, 2)[:, None]
                prediction = learner.predict(learner.inputs(batch))
                shown = batch[self._key]
                grasp.append(
                    self._turned_back(prediction.grasp, inverse, shown)
                )
                excess.append(self.hand.excess(prediction.predicted_joints))
                reference = lower + (batch["grasp"] + 1) / 2 * (upper - lower)
                references.append(self._turned_back(reference, inverse, shown))
                objects.append(shown)
        lists = (grasp, references, objects, excess)
        return SampledGrasps(*(torch.cat(tensors) for tensors in lists))

    def _turned_back(
        self, grasp: Tensor, back: Tensor, objects: Tensor
    ) -> Tensor:
        """Rotates grasps [B, G, 25] back to the frames of the objects [B, ...]; of equivalent views
        from above, it selects the one with the usual position of the palm.
        """
        grasp = rotated(grasp, back)
        if self.config.frame == "object":
            return grasp
        # Clouds of equivalent views are equal, so that a learner cannot distinguish them.
        azimuth = torch.atan2(grasp[..., 1], grasp[..., 0]) - self._azimuth
        return rotated(grasp, yaw(-self.equivalent_turns(azimuth, objects)))

    def equivalent_turns(self, azimuth: Tensor, objects: Tensor) -> Tensor:
        """Returns for angles [B, G] in radians the nearest one by which an object can be turned
        about z and looks the same: quarter turns of a cube.
        """
        return torch.round(azimuth / (math.pi / 2)) * (math.pi / 2)

    def _close(self, grasp: Tensor, objects: Tensor) -> dict[str, Tensor]:
        """Returns the ``verdicts`` on grasps [B, G, 25] of objects [B, ...]: [B * G] each."""
        repeated = objects.repeat_interleave(grasp.shape[1], 0)
        return verdicts(self.hand, grasp.flatten(0, 1), repeated)


def _distance_mm(keypoints: Tensor, references: Tensor) -> Tensor:
    """Returns the mean distance of keypoints [..., K, 3] in metres: [...] in mm."""
    distance: Tensor = 1e3 * (keypoints - references).norm(dim=-1).mean(-1)
    return distance
