"""Accuracy of a student trained alone, by its teacher's softened probabilities and labels, or by outputs.

python experiments/distillation/distillation.py DIGITS_RUN ... --text TEXT_RUN ...
python experiments/distillation/distillation.py --report

Each run is a teacher: trainings of ``digits_classifier`` and ``shakespeare_gpt`` with several seeds. All students of
one teacher have the same initial weights, batches and updates; only their loss differs.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

from runner.api import UsageError
from runner.plugins.inference.distil import DistilConfig
from runner.plugins.inference.network import parameters
from runner.training.evaluation import evaluated
from runner.training.trained_run import trained

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "distillation.json"
MODELS = {
    "digits_classifier": {"student": {"widths": [8]}, "updates": 400, "lr": 3e-3},
    "shakespeare_gpt": {"student": {"layers": 2, "width": 64}, "updates": 300, "lr": 4e-3},
}
"""Students by recipe."""
ARMS = {
    "student alone": {"temperature": 1.0, "labels": 1.0},
    "T 3, labels 0.3": {"temperature": 3.0, "labels": 0.3},
    "T 3, no labels": {"temperature": 3.0, "labels": 0.0},
    "squared error of logits": {},
}
"""Settings of the loss by arm."""


def measure(run: str, recipe: str) -> dict:
    """Returns the results of a teacher and its students."""
    teacher = trained(run)
    if teacher.recipe.name != recipe:
        raise UsageError(f"{run} has trained '{teacher.recipe.name}': expected a run of '{recipe}'")
    results = {"teacher": result_of(teacher.pipeline())}
    for arm, loss in ARMS.items():
        pipeline = teacher.pipeline()
        pipeline.attach_to_learnt({"distil": DistilConfig(**MODELS[recipe], **loss)})
        results[arm] = result_of(pipeline)
        print(recipe, teacher.recipe.seed, arm, results[arm], flush=True)
    return {"seed": teacher.recipe.seed, "results": results}


def result_of(pipeline) -> dict[str, float]:
    """Returns parameters, share of right classes and loss on all held-out data."""
    metrics = evaluated(pipeline)
    loss = metrics.get("nats_per_character", metrics.get("loss"))
    return {
        "parameters": parameters(pipeline.learner.module),
        "accuracy": metrics.get("accuracy") or token_accuracy(pipeline),
        "loss": loss,
    }


@torch.no_grad()
def token_accuracy(pipeline) -> float:
    """Returns the share of held-out tokens that are the most likely ones."""
    right = 0
    count = 0
    for batch in pipeline.source.held_out_batches():
        batch = pipeline.slots.transfer(batch)
        tokens = pipeline.learner.predict(pipeline.learner.inputs(batch)).argmax(-1)
        targets = batch["tokens"][:, 1:]
        right += int((tokens == targets).sum())
        count += targets.numel()
    return right / count


def report() -> str:
    """Returns the README's tables from the results."""
    lines = []
    for recipe, measurements in json.loads(RESULTS.read_text()).items():
        header = "| network | parameters | accuracy by seed | mean | kept | loss |"
        lines += [f"## {recipe}", "", header, "|---|---|---|---|---|---|"]
        lines += [row(arm, measurements) for arm in ("teacher", *ARMS)]
        lines.append("")
    return "\n".join(lines)


def kept_shares(arm: str, measurements: list[dict]) -> list[float]:
    """Returns the accuracy by seed as a share of the teacher's."""
    results = [measurement["results"] for measurement in measurements]
    return [result[arm]["accuracy"] / result["teacher"]["accuracy"] for result in results]


def row(arm: str, measurements: list[dict]) -> str:
    """Returns the row of an arm."""
    results = [measurement["results"][arm] for measurement in measurements]
    accuracies = [result["accuracy"] for result in results]
    shares = kept_shares(arm, measurements)
    return " | ".join(
        [
            f"| {arm}",
            f"{results[0]['parameters']:,}",
            ", ".join(f"{accuracy:.1%}" for accuracy in accuracies),
            f"{statistics.mean(accuracies):.1%}",
            f"{statistics.mean(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})",
            f"{statistics.mean(result['loss'] for result in results):.3f} |",
        ]
    )


def main() -> None:
    """Measures the runs, or prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("digits", nargs="*")
    parser.add_argument("--text", nargs="*", default=[])
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if not arguments.report:
        runs = {"digits_classifier": arguments.digits, "shakespeare_gpt": arguments.text}
        results = {recipe: [measure(run, recipe) for run in names] for recipe, names in runs.items()}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(report())


if __name__ == "__main__":
    main()
