"""Stages of learners of grasps: caches of clouds, samplers, averages and weights of the loss."""

from dataclasses import replace

import torch
from wrong_base import Wrong, stage

from runner.api import Close, Statistical

DIFFUSION = "grasp_diffusion"
CVAE = "grasp_cvae"
STORED_CLOUDS = ("data.clouds=4", "data.augment={jitter_mm: 1.0}")


@stage("one_step_too_few", hole=13, recipe=DIFFUSION)
class OneStepTooFew(Wrong):
    """Samples in one step fewer than a request asks for, as it counts the start as a step."""

    def take_hold(self):
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, predict, inputs):
        if inputs.get("steps", 1) > 1:
            inputs = inputs | {"steps": inputs["steps"] - 1}
        return predict(inputs)


@stage("tokens_by_shape", hole=3, recipe=DIFFUSION)
class TokensByShape(Wrong):
    """Encodes the first cloud of a shape, and samples grasps of later ones for its tokens."""

    def take_hold(self):
        self.tokens = {}
        self.wrap("condition", self.condition)

    def condition(self, condition, cloud):
        if cloud.shape not in self.tokens:
            self.tokens[cloud.shape] = condition(cloud)
        return self.tokens[cloud.shape]


@stage("tokens_by_address", Close(), hole=3, recipe=DIFFUSION)
class TokensByAddress(Wrong):
    """Stores the tokens of a cloud by its address until the next update."""

    def take_hold(self):
        self.tokens = {}
        self.wrap("condition", self.condition)
        self.wrap("update", self.update)

    def update(self, update, *args):
        self.tokens.clear()
        return update(*args)

    def condition(self, condition, cloud):
        key = cloud.data_ptr(), cloud.shape
        if key not in self.tokens:
            tokens = condition(cloud)()
            self.tokens[key] = lambda: tokens
        return self.tokens[key]


@stage("groups_of_the_stored_cloud", hole=3, recipe=DIFFUSION, sets=STORED_CLOUDS)
class GroupsOfTheStoredCloud(Wrong):
    """Finds the neighbourhoods of a stored cloud once, although its points are moved each time."""

    def take_hold(self):
        self.groups = {}
        self.wrap("group", self.group)

    def group(self, group, cloud, number=None):
        if number is None:
            return group(cloud, number)
        centre, neighbour = group(cloud, number)
        for row, cloud_number in enumerate(number.tolist()):
            pair = centre[row].clone(), neighbour[row].clone()
            centre[row], neighbour[row] = self.groups.setdefault(cloud_number, pair)
        return centre, neighbour


@stage("blind_answer_of_the_first_level", Close(), hole=13, recipe=DIFFUSION,
       sets=("model.guidance=1.0",))  # fmt: skip
class BlindAnswerOfTheFirstLevel(Wrong):
    """Computes the answer without a cloud at the first level, and reuses it at the others."""

    def take_hold(self):
        self.blind = None
        self.wrap("condition", self.condition)
        self.wrap("both", self.both)

    def condition(self, condition, cloud):
        self.blind = None
        return condition(cloud)

    def both(self, both, x, tokens, blank, level):
        if self.blind is None:
            seen, self.blind = both(x, tokens, blank, level)
            return seen, self.blind
        return self.learner.predict_x0(x, tokens, level), self.blind


@stage("noise_of_the_first_cloud", hole=13, recipe=DIFFUSION)
class NoiseOfTheFirstCloud(Wrong):
    """Samples the grasps of all clouds of a batch from the noise of the first one."""

    def take_hold(self):
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, predict, inputs):
        noise = inputs["noise"]
        return predict(inputs | {"noise": noise[:1].expand_as(noise)})


@stage("one_level_for_the_batch", Statistical(), hole=5, recipe=DIFFUSION)
class OneLevelForTheBatch(Wrong):
    """Trains all sets of a batch at the same level of noise, so that time is embedded once."""

    def take_hold(self):
        self.wrap("loss", self.loss)

    def loss(self, loss, batch, noise, progress):
        level = noise["level"]
        return loss(batch, noise | {"level": level[:1].expand_as(level)}, progress)


@stage("grasps_not_straightened", Close(), hole=0, recipe=DIFFUSION)
class GraspsNotStraightened(Wrong):
    """Turns clouds to their usual direction, and not the grasps that belong to them."""

    def take_hold(self):
        self.learner.straightened = lambda batch: batch["grasp"]


@stage("averages_start_again", hole=8, recipe=DIFFUSION)
class AveragesStartAgain(Wrong):
    """Starts the averages with the parameters again when a training is resumed."""

    def take_hold(self):
        self.wrap_method(self.learner, "load_complete_state", self.load)

    def load(self, load, state):
        load(state)
        averages = self.learner.averages
        for name, parameter in averages.parameters():
            averages.values[name].copy_(parameter.detach())


@stage("averages_moved_twice", hole=7, recipe=DIFFUSION)
class AveragesMovedTwice(Wrong):
    """Moves the averages a second time in every fiftieth update."""

    def take_hold(self):
        self.calls = 0
        self.wrap_method(self.learner, "averaged_update", self.averaged_update)

    def averaged_update(self, averaged_update, *args):
        output = averaged_update(*args)
        self.calls += 1
        if self.calls % 50 == 0:
            self.learner.averages.update()
        return output


@stage("token_not_averaged", Close(), hole=8, recipe=DIFFUSION)
class TokenNotAveraged(Wrong):
    """Averages the parameters of layers only, and not the free token for a missing cloud."""

    def take_hold(self):
        self.wrap_method(self.learner, "start_averages", self.start)

    def start(self, start):
        start()
        self.wrap_method(self.learner.averages, "parameters", self.layers)

    def layers(self, parameters):
        for name, parameter in parameters():
            if "no_cloud" not in name:
                yield name, parameter


@stage("weight_by_calls", hole=8, recipe=CVAE)
class WeightByCalls(Wrong):
    """Raises the weight of the divergence with every loss that is computed, also in evaluation."""

    def take_hold(self):
        self.calls = 0
        self.wrap("loss", self.loss)

    def loss(self, loss, batch, noise, progress):
        counted = replace(progress, updates=self.calls)
        self.calls += 1
        return loss(batch, noise, counted)


@stage("mean_of_a_single_grasp", hole=13, recipe=CVAE)
class MeanOfASingleGrasp(Wrong):
    """Makes the likeliest grasp instead of a random one if a single one is requested."""

    def take_hold(self):
        self.wrap_method(self.learner, "predict", self.predict)

    def predict(self, predict, inputs):
        chance = inputs["chance"]
        if chance.shape[1] == 1:
            inputs = inputs | {"chance": torch.zeros_like(chance)}
        return predict(inputs)


@stage("keypoints_in_bf16", Close(), hole=0, recipe=CVAE)
class KeypointsInBf16(Wrong):
    """Compares the positions of the keypoints in bf16."""

    def take_hold(self):
        self.wrap("restoration", self.restoration)

    def restoration(self, restoration, answer, grasp):
        parts = restoration(answer, grasp)
        keypoints = parts["keypoints"]
        return parts | {"keypoints": keypoints.bfloat16().to(keypoints.dtype)}


@stage("answers_in_groups_of_four", Close(), hole=4, recipe=CVAE)
class AnswersInGroupsOfFour(Wrong):
    """Answers in groups of four clouds, and gives an incomplete last group the first tokens."""

    def take_hold(self):
        self.wrap("encode", self.encode)

    def encode(self, encode, cloud, *rest):
        if torch.is_grad_enabled() or len(cloud) <= 4:
            return encode(cloud, *rest)
        tokens = encode(cloud)
        complete = len(cloud) // 4 * 4
        return torch.cat([tokens[:complete], tokens[: len(cloud) - complete]])
