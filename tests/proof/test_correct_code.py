"""Rewrites that are correct although they round, saturate or keep their state in another way than the baseline."""

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits, cross_entropy, linear, nll_loss

from runner.api import Mean
from runner.proof import Close, Outcome, Subject, verify
from runner.proof.trees import leaves


def table(count=6, rows=32):
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(rows, 6, generator=draw),
            "y": (torch.rand(rows, 1, generator=draw) > 0.5).float(),
            "label": torch.randint(0, 3, (rows,), generator=draw),
        }
        for _ in range(count)
    ]


def trained(loss, outputs=1):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, outputs))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def step(batch):
            optimizer.zero_grad()
            value = loss(model(batch["x"]), batch)
            value.backward()
            optimizer.step()
            return value.detach()

        return Subject(step, {"model": model, "optimizer": optimizer})

    return build


def of_sigmoid(logits, batch):
    return binary_cross_entropy(logits.sigmoid(), batch["y"])


def of_logits(logits, batch):
    return binary_cross_entropy_with_logits(logits, batch["y"])


def of_softmax(logits, batch):
    return nll_loss(
        logits.softmax(1).clamp(min=1e-300 if logits.dtype == torch.float64 else 1e-38).log(), batch["label"]
    )


STABILISED = {
    "a cross-entropy of a sigmoid": (of_sigmoid, of_logits, 1),
    "a cross-entropy of a sigmoid, written out": (
        of_sigmoid,
        lambda z, b: (z.relu() - z * b["y"] + (-z.abs()).exp().log1p()).mean(),
        1,
    ),
    "a cross-entropy of a softmax": (of_softmax, lambda z, b: cross_entropy(z, b["label"]), 3),
}


@pytest.mark.parametrize("name", STABILISED)
def test_a_loss_that_has_more_digits_where_the_baseline_runs_out_of_them_passes(name):
    baseline, changed, outputs = STABILISED[name]
    verdict = verify(trained(baseline, outputs), trained(changed, outputs), table(), Close())
    assert verdict, verdict


@pytest.mark.parametrize("limit", [4.0, 20.0])
def test_a_limit_that_is_part_of_the_algebra_may_not_be_left_out(limit):
    def limited(logits, batch):
        return of_logits(logits.clamp(-limit, limit), batch)

    assert verify(trained(limited), trained(of_logits), table(), Close()).outcome is Outcome.FAIL
    assert verify(trained(of_logits), trained(limited), table(), Close()).outcome is Outcome.FAIL


def searching(rewritten=False, factor=1.0, **options):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, **options)

        def predict(x):
            if not rewritten:
                return model(x)
            hidden = linear(x, model[0].weight, model[0].bias).tanh()
            return factor * linear(hidden, model[2].weight) + model[2].bias

        def step(batch):
            def closure():
                optimizer.zero_grad()
                loss = (predict(batch["x"]) - batch["y"]).square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return Subject(step, {"model": model, "optimizer": optimizer})

    return build


@pytest.mark.parametrize("options", [{}, {"line_search_fn": "strong_wolfe"}, {"history_size": 2}])
def test_an_optimizer_that_evaluates_a_closure_is_compared(options):
    verdict = verify(searching(**options), searching(rewritten=True, **options), table(), Close())
    assert verdict, verdict
    wrong = searching(rewritten=True, factor=1.001, **options)
    assert verify(searching(**options), wrong, table(), Close()).outcome is Outcome.FAIL


def pixels(memory, factor=1.0):
    def build():
        torch.manual_seed(0)
        parts = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        model = nn.Sequential(*parts, nn.Linear(8, 3)).to(memory_format=memory)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            optimizer.zero_grad()
            image = batch["image"].contiguous(memory_format=memory)
            loss = cross_entropy(model(image), batch["label"])
            (factor * loss).backward()
            optimizer.step()
            return loss.detach()

        return Subject(step, {"model": model, "optimizer": optimizer})

    return build


def test_normalisations_of_many_pixels_may_round_as_the_kernel_of_the_other_format_does():
    draw = torch.Generator().manual_seed(1)
    batches = [
        {"image": torch.randn(64, 3, 28, 28, generator=draw), "label": torch.randint(0, 3, (64,), generator=draw)}
        for _ in range(4)
    ]
    verdict = verify(pixels(torch.contiguous_format), pixels(torch.channels_last), batches, Close())
    assert verdict, verdict
    wrong = pixels(torch.channels_last, 1.00001)
    assert verify(pixels(torch.contiguous_format), wrong, batches, Close()).outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Mean(torch.tensor(3.0), 4), {"mean": 0.75}),
        (Mean(3.0, 4), {"mean": 0.75}),
        (Mean(torch.tensor(1.5), torch.tensor(2)), {"mean": 0.75}),
        (Mean(0.0, 0), {"mean": 0.0}),
        (Mean(torch.tensor(3), 4), {"sum": 3, "count": 4}),
        (Mean(3, 4), {"sum": 3, "count": 4}),
    ],
)
def test_sums_of_numbers_are_compared_as_means_and_counted_things_as_they_are(value, expected):
    assert {name: float(leaf) for name, leaf in leaves(value)} == expected
