"""Stages for learners of grasps that are wrong on purpose."""

from functools import cache

import torch
from wrong_on_purpose import wrong

from runner.api import Stage
from runner.plugins.grasps.geometry import yaw


@wrong("stale_condition_cache", ["condition"])
class StaleConditionCache(Stage):
    """Keeps the tokens of a cloud when the weights change."""

    def attach(self, pipeline):
        kept = {}

        def stale(condition):
            def remembering(cloud):
                key = cloud.detach().cpu().numpy().tobytes()
                return kept.setdefault(key, cache(condition(cloud)))

            return remembering

        pipeline.slots.wrap("condition", stale)


@wrong("grouping_cache_with_jitter", ["group"])
class GroupingCacheWithJitter(Stage):
    """Keeps the neighbourhoods of a cloud by its number, although its points are moved whenever it is drawn."""

    def attach(self, pipeline):
        kept = {}

        def remembering(group):
            def remembered(cloud, number=None):
                if number is None:
                    return group(cloud)
                for row, each in enumerate(number.tolist()):
                    if each not in kept:
                        kept[each] = tuple(part[0] for part in group(cloud[row : row + 1]))
                return tuple(torch.stack(parts) for parts in zip(*(kept[n] for n in number.tolist()), strict=True))

            return remembered

        pipeline.slots.wrap("group", remembering)


@wrong("double_scaler", ["backward"])
class DoubleScaler(Stage):
    """Scales the loss for half precision once more than is taken back before the optimizer's step."""

    def attach(self, pipeline):
        pipeline.slots.wrap("backward", lambda step: lambda loss, *rest: step(2.0**10 * loss, *rest))


@wrong("turned_without_its_label", ["next_batch"])
class TurnedWithoutItsLabel(Stage):
    """Turns clouds by 15 degrees, and leaves the grasps where they were."""

    def attach(self, pipeline):
        turn = yaw(torch.tensor(torch.pi / 12))

        def turning(step):
            def turned_alone(*args):
                batch = step(*args)
                return None if batch is None else {**batch, "cloud": batch["cloud"] @ turn.T}

            return turned_alone

        pipeline.slots.wrap("next_batch", turning)
