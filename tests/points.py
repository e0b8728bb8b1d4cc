"""Source code of the learner's methods and the data that hostile and secret plugins of tests have in common."""

_CODE = '''
    def inputs(self, batch):
        return batch["x"]


class PointsConfig(SourceConfig):
    """Random points."""

    kind: ClassVar[str] = "points"
    implementation = "Points"
    provides: ClassVar[str] = "points"


class Points(Source):
    shapes = {"x": (2,)}

    def __init__(self, config, context):
        self.generator = context.generator("points", "cpu")

    def draw(self, batch_size, progress):
        return {"x": torch.rand(batch_size, 2, generator=self.generator)}

    def evaluate(self, learner):
        return METRICS
'''


def with_points(learner: str, metrics: str) -> str:
    """Returns the code of a plugin.

    Args:
        learner: Code that ends with the class of a learner; its method ``inputs`` is added.
        metrics: An expression for what an evaluation returns.
    """
    return learner + _CODE.replace("METRICS", metrics)
