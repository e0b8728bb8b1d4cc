"""Stages around simulators: episodes, resets, replay buffers and their evaluation."""

from dataclasses import replace

import torch
from wrong_base import Wrong, stage

from runner.api import Close, Statistical

SPREAD = "marl_spread"
NORMALIZED = ("data.normalize_rewards=true",)
SHORT = ("data.training_limit=60",)


@stage("flights_without_limit", hole=14, sets=SHORT)
class FlightsWithoutLimit(Wrong):
    """Lets flights of the training go on after the limit at which they should be cut off."""

    def take_hold(self):
        self.source._environment.episode_limit = 10**6


@stage("limit_one_step_late", hole=14)
class LimitOneStepLate(Wrong):
    """Cuts a flight off one step after the limit."""

    def take_hold(self):
        self.source._environment.episode_limit += 1


@stage("acts_on_the_last_observation", hole=14, recipe=SPREAD)
class ActsOnTheLastObservation(Wrong):
    """Acts in a new episode on what was observed at the end of the old one."""

    def take_hold(self):
        self.wrap_method(self.source._environment, "step", self.step)

    def step(self, step, action):
        outcome = step(action)
        return replace(outcome, observation=outcome.next_observation)


@stage("follows_into_the_next_episode", hole=14, recipe=SPREAD)
class FollowsIntoTheNextEpisode(Wrong):
    """Stores the first observation of the next episode as what the last action led to."""

    def take_hold(self):
        self.wrap_method(self.source._environment, "step", self.step)

    def step(self, step, action):
        outcome = step(action)
        return replace(outcome, next_observation=outcome.observation)


@stage("newest_never_sampled", hole=14, recipe=SPREAD)
class NewestNeverSampled(Wrong):
    """Replaces the newest transition of a batch by the one before it."""

    def take_hold(self):
        self.wrap_method(self.source._replay, "_take", self.take)

    def take(self, take, index):
        replay = self.source._replay
        newest = (replay._written - 1) % replay.capacity
        return take(torch.where(index == newest, (index - 1) % replay.capacity, index))


@stage("ring_one_shorter", hole=14, recipe=SPREAD)
class RingOneShorter(Wrong):
    """Starts to overwrite the oldest transition one place before the end of the buffer."""

    def take_hold(self):
        self.wrap_method(self.source._replay, "_places", self.places)

    def places(self, places, first, last):
        return torch.arange(first, last).remainder_(self.source._replay.capacity - 1)


@stage("rewards_clipped_in_the_buffer", hole=14)
class RewardsClippedInTheBuffer(Wrong):
    """Clips rewards beyond 500 in the buffer, as large ones are rare."""

    def take_hold(self):
        self.wrap_method(self.source._replay, "store", self.store)

    def store(self, store, batch):
        return store(batch | {"reward": batch["reward"].clamp(-500, 500)})


@stage("scale_of_a_hundred_batches", Close(), hole=14, sets=NORMALIZED)
class ScaleOfAHundredBatches(Wrong):
    """Computes the scale of rewards for every hundredth batch only."""

    def take_hold(self):
        self.calls = 0
        self.scale = None
        self.wrap_method(self.source, "reward_scale", self.reward_scale)

    def reward_scale(self, reward_scale):
        if self.calls % 100 == 0:
            self.scale = reward_scale()
        self.calls += 1
        return self.scale


@stage("episodes_counted_again", hole=14)
class EpisodesCountedAgain(Wrong):
    """Counts further episodes of a simulation in an evaluation, not only the first."""

    def take_hold(self):
        self.wrap_method(self.source, "rollout", self.rollout)

    def rollout(self, rollout, *args):
        for step, running in rollout(*args):
            yield step, torch.ones_like(running)


@stage("evaluation_of_sixty_steps", hole=14)
class EvaluationOfSixtySteps(Wrong):
    """Stops an evaluation after sixty steps, and counts the episodes that are over by then."""

    def take_hold(self):
        self.wrap_method(self.source, "rollout", self.rollout)

    def rollout(self, rollout, *args):
        for number, pair in enumerate(rollout(*args)):
            yield pair
            if number == 60 and not pair[1].all():
                return


@stage("other_flights_each_time", hole=14)
class OtherFlightsEachTime(Wrong):
    """Makes the simulation of the evaluation once, whose next flights then differ."""

    def take_hold(self):
        self.environment = None
        self.wrap_method(self.source, "held_out", self.held_out)

    def held_out(self, held_out):
        if self.environment is None:
            self.environment, observation = held_out()
            return self.environment, observation
        return self.environment, self.environment.reset()


@stage("seeds_of_the_first_episodes", hole=14, recipe=SPREAD)
class SeedsOfTheFirstEpisodes(Wrong):
    """Starts every episode with the seeds of the first ones, whose starts are stored."""

    def take_hold(self):
        for simulation in self.source._environment._simulations:
            seed = simulation.seed
            self.wrap_method(simulation, "reset", lambda reset, _, seed=seed: reset(seed))


@stage("acts_one_step_behind", Statistical(), hole=14)
class ActsOneStepBehind(Wrong):
    """Selects actions while the simulation steps, and so from the observation before."""

    def take_hold(self):
        self.observation = None
        self.wrap_method(self.learner, "act", self.act)

    def act(self, act, observation, generator):
        last, self.observation = self.observation, observation
        return act(observation if last is None else last, generator)


@stage("discount_of_the_first_agent", Close(), hole=14, sets=("model.gamma=[0.98, 0.9]",))
class DiscountOfTheFirstAgent(Wrong):
    """Computes the targets of all agents together, with the discount of the first one."""

    def take_hold(self):
        self.learner.gamma = self.learner.gamma[:1].expand_as(self.learner.gamma)


@stage("policy_numbers_not_saved", hole=14, recipe=SPREAD)
class PolicyNumbersNotSaved(Wrong):
    """Explores with random numbers of a generator that no checkpoint contains."""

    def take_hold(self):
        state = self.source._policy.get_state()
        self.generator = torch.Generator()
        self.generator.set_state(state)
        self.source._policy = self.generator
