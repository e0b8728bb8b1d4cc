"""Processor time of one answer with fixed ranges (static int8) and with ranges of each call (dynamic), beside float32.

python experiments/static_int8/static_int8.py RUN ...

The three variants are timed in turns in one process, on one thread, by its processor time. A ratio is that of two times of one round;
reported are the median and the quartiles over all rounds.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch

from runner.plugins.inference.calibration import Calibration
from runner.plugins.inference.quantise import QuantiseConfig
from runner.training.evaluation import evaluated
from runner.training.trained_run import Trained, trained

RESULTS = Path(__file__).parent / "static_int8.json"
STATIC = Calibration(data="train", share=0.1)
ROUNDS = 41
REQUESTS = (1, 16)
EVALUATED = 360
"""Held-out samples of the objective."""


def variants_of(run: Trained) -> dict:
    """Returns pipelines of the run's model by variant."""
    stages = {
        "float32": {},
        "dynamic": {"quantise": QuantiseConfig()},
        "static": {"quantise": QuantiseConfig(calibration=STATIC)},
    }
    pipelines = {}
    for name, inference in stages.items():
        pipelines[name] = run.pipeline()
        pipelines[name].attach_to_learnt(inference)
    return pipelines


@torch.no_grad()
def seconds(pipelines: dict, requests: int) -> dict[str, list[float]]:
    """Returns the seconds of one answer by variant, a value for each round."""
    pipeline = pipelines["float32"]
    batch = pipeline.slots.transfer(pipeline.source.draw(pipeline.batch_size, pipeline.progress))
    inputs = pipeline.learner.inputs(next(pipeline.source.split(batch, requests)))
    times: dict[str, list[float]] = {name: [] for name in pipelines}
    for number in range(ROUNDS + 3):
        # The order changes, because a variant may find the caches of the one before.
        names = list(pipelines)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            variant = pipelines[name]
            start = time.process_time()
            for _ in range(3):
                variant.learner.predict(inputs)
            # The first rounds warm up.
            if number >= 3:
                times[name].append((time.process_time() - start) / 3)
    return times


def quartiles(numerators: list[float], denominators: list[float]) -> list[float]:
    """Returns the lower quartile, the median and the upper quartile of the rounds' ratios."""
    ratios = [first / second for first, second in zip(numerators, denominators, strict=True)]
    return [round(value, 3) for value in statistics.quantiles(ratios, n=4)]


def measure(name: str) -> dict:
    """Returns speeds, bytes and objective of a run's variants."""
    run = trained(name)
    pipelines = variants_of(run)
    result: dict = {"recipe": run.recipe.name, "seed": run.recipe.seed, "speed": {}, "bytes": {}, "objective": {}}
    for requests in REQUESTS:
        times = seconds(pipelines, requests)
        result["speed"][requests] = {
            "dynamic": quartiles(times["float32"], times["dynamic"]),
            "static": quartiles(times["float32"], times["static"]),
            "static against dynamic": quartiles(times["dynamic"], times["static"]),
        }
    objective = run.recipe.objective.name
    for variant, pipeline in pipelines.items():
        pipeline.source.limit_evaluation(EVALUATED)
        result["objective"][variant] = evaluated(pipeline)[objective]
        if pipeline.stages:
            result["bytes"][variant] = pipeline.stages["quantise"].bytes
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    RESULTS.write_text(json.dumps([measure(name) for name in sys.argv[1:]], indent=1) + "\n")
