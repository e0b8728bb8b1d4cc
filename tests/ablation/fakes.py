"""Stages that are fast because they do not do the baseline's work, and one that remembers the last batches."""

from typing import ClassVar

from runner.api import Close, Exact, Pipeline, Setting, Stage, StageConfig


class FakeConfig(StageConfig):
    """Something that no training should have."""

    phase: ClassVar[int] = 3
    wraps: ClassVar[frozenset[str]] = frozenset({"update"})

    after: int = 10
    """Honest updates before the first fake one: as many as a quick look compares."""

    def contract(self, setting: Setting) -> Exact:
        """What it falsely promises."""
        return Exact()


class SkipsEverySecondConfig(FakeConfig):
    """Skips every second update, and returns what the one before has returned."""

    kind: ClassVar[str] = "skips_every_second"
    implementation = "SkipsEverySecond"


class ReplaysConfig(FakeConfig):
    """Returns what an earlier update has returned, and trains nothing."""

    kind: ClassVar[str] = "replays"
    implementation = "Replays"


class OldGradientsConfig(FakeConfig):
    """Takes the gradients of every second batch from the batch before."""

    kind: ClassVar[str] = "old_gradients"
    implementation = "OldGradients"
    wraps: ClassVar[frozenset[str]] = frozenset({"loss"})

    def contract(self, setting: Setting) -> Close:
        """What it falsely promises."""
        return Close()


class RemembersEightConfig(FakeConfig):
    """Remembers for the last eight batches that it has seen them: harmless, and worth nothing."""

    kind: ClassVar[str] = "remembers_eight"
    implementation = "RemembersEight"
    wraps: ClassVar[frozenset[str]] = frozenset({"loss"})


class PostponesConfig(FakeConfig):
    """Makes updates only when somebody reads the parameters."""

    kind: ClassVar[str] = "postpones"
    implementation = "Postpones"


class Fake(Stage):
    """A step that is replaced now and then."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the update."""
        self.updates = 0
        self.last = None
        pipeline.slots.wrap("update", self.faked)

    def faked(self, step):
        """The update, honest at first."""

        def update(*arguments):
            self.updates += 1
            if self.updates <= self.config.after or not self.is_fake():
                self.last = step(*arguments)
            return self.last

        return update


class SkipsEverySecond(Fake):
    """Every second update is none."""

    def is_fake(self) -> bool:
        """Whether this one is skipped."""
        return self.updates % 2 == 0


class Replays(Fake):
    """No update is one."""

    def is_fake(self) -> bool:
        """All of them."""
        return True


class OldGradients(Stage):
    """Every second loss is that of the batch before."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the loss."""
        self.calls = 0
        self.batch = None

        def old(step):
            def loss(batch, *rest):
                self.calls += 1
                if self.calls <= self.config.after or self.calls % 2:
                    self.batch = batch
                return step(self.batch, *rest)

            return loss

        pipeline.slots.wrap("loss", old)


class RemembersEight(Stage):
    """Counts how often one of the last eight batches comes again."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the loss."""
        self.kept: list[bytes] = []
        self.hits = 0

        def remembering(step):
            def loss(batch, *rest):
                key = b"".join(value.numpy().tobytes() for value in batch.values())
                self.hits += key in self.kept
                self.kept = [*self.kept[-7:], key]
                return step(batch, *rest)

            return loss

        pipeline.slots.wrap("loss", remembering)


class Postpones(Stage):
    """Updates wait in a list until the state is read."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the update, and the reading of the state."""
        self.waiting = []
        self.is_open = False
        read_state = pipeline.learner.state_dict

        def state_dict():
            self.catch_up()
            return read_state()

        pipeline.learner.state_dict = state_dict
        pipeline.slots.wrap("update", self.postponed)

    def catch_up(self) -> None:
        """Makes the updates that wait."""
        waiting, self.waiting = self.waiting, []
        for step, arguments in waiting:
            self.last = step(*arguments)

    def postponed(self, step):
        """The update, later."""

        def update(*arguments):
            if not self.is_open:
                self.last = step(*arguments)
            else:
                self.waiting.append((step, arguments))
            return self.last

        return update
