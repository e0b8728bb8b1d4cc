"""Ablations that nobody measured: logs in which every stage does exactly what a test says."""

import math
import random
from dataclasses import replace
from pathlib import Path

import torch
from running import tiny

from runner.ablation.analysis import Result, analyse
from runner.ablation.case_log import CaseLog
from runner.ablation.experiment import Case
from runner.verify.variants import AGAIN, variants_of

OFF = tuple(f"optimization.{kind}=off" for kind in ("amp", "compile", "float32_matmul", "heap_retention"))
BASE_S = 0.010
SHARE = 1 / 6
"""Of the whole training: what a moment of it, eight updates, is."""


def case(name="", sets=OFF, published=None):
    """The small flagship with forward_cache, merged_critic_loss, stacked_agents and fused_optimizer."""
    return Case(name, tiny("marl_phase3", *sets), tuple(sets), published or {})


def variant_set(of):
    return variants_of(of.recipe, torch.device("cpu"))


def entries(of, factors, noise=0.0, lucky=0.0, a_a=1.0, rounds=12, overhead=None, verdicts=None, agents=4,
            sampling=None, caught=None):  # fmt: skip
    """The log of a case in which every stage is ``factors[stage]`` times as fast, whatever is beside it.

    Args:
        of: the case.
        factors: by stage; 1 for those that are not named.
        noise: standard deviation of the logarithm of every time.
        lucky: standard deviation of the logarithm of what a process is slower by for as long as it lives.
        a_a: by how much the second baseline is slower than the first.
        rounds: how many.
        overhead: seconds of start-up by stage.
        verdicts: outcome by variant.
        agents: the least work grows with them.
        sampling: seconds of a training step beside its update; as long as that if None.
        caught: what was caught after the timed updates, by variant.
    """
    draw = random.Random(0)
    variants = {variant.name: variant.stages for variant in variant_set(of).variants} | {AGAIN: ()}
    speed = {name: math.prod(factors.get(kind, 1.0) for kind in stages) for name, stages in variants.items()}
    speed[AGAIN] /= a_a
    whose = {"session": 1, "spent": 1.0, "case": of.name}
    yield {**whose, "rates": {"default_flops": 1e11, "relaxed_flops": 2e11, "relaxed_error": 1e-7, "copy_bytes": 3e10,
                              "half_flops": {"bf16": 8e11}}}  # fmt: skip
    yield {**whose, "cost": {"flop": 10**7, "optimizer_bytes": 28_000, "least": [agents * 10**6, 10**5]}}
    for name, stages in variants.items():
        extra = sum((overhead or {}).get(kind, 0.0) for kind in stages)
        seconds = BASE_S / speed[name]
        prepared = {"first_s": extra + seconds, "seconds": 5 * seconds, "steps": 5, "steady_s": seconds, "steady": True}
        prepared |= {"overhead_s": extra, "updates": 9, "batch_size": 16, "threads": 1, "device": "cpu", "notes": {}}
        yield {**whose, "variant": name, "prepared": prepared}
    luck = {}
    for turn in range(1, rounds + 1):
        if turn % 3 == 1:  # processes live for three rounds
            luck = {name: math.exp(draw.gauss(0, lucky)) for name in variants}
        update = {name: luck[name] * BASE_S / speed[name] * math.exp(draw.gauss(0, noise)) for name in variants}
        apart = {name: sampling and sampling * math.exp(draw.gauss(0, noise)) for name in update}
        train = {name: block(seconds, apart[name]) for name, seconds in update.items()} if turn % 2 == 0 else {}
        yield {**whose, "round": turn, "process": (turn + 2) // 3, "update": update, "train": train}
    for name in variants:
        yield {**whose, "variant": name, "memory": {"host_bytes": 2**28, "device_bytes": None}}
        said = {"updates": 13, "caught": (caught or {}).get(name, ""), "reason": ""}
        yield {**whose, "variant": name, "compared": said}
    for name, outcome in (verdicts or {}).items():
        told = {"outcome": outcome, "contract": "Exact", "summary": f"{name} {outcome.lower()}s in critic_step"}
        yield {**whose, "variant": name, "verdict": told}
    yield {**whose, "settled": sorted(variants), "done": f"{rounds} rounds were measured"}


def block(seconds, sampling=None):
    """A moment of training: eight updates, and what is collected for them."""
    collected = seconds if sampling is None else sampling
    spent = {"collect": 8 * collected, "draw": 0.0, "transfer": 0.0, "update": 8 * seconds}
    return {"seconds": 8 * (collected + seconds), "done": 16, "share": SHARE, "updates": 8, "spent": spent}


def analysed(of, factors, **settings):
    return analyse(of, variant_set(of), CaseLog(list(entries(of, factors, **settings))))


def result(*cases, folder: Path = Path("out"), **changes):
    whole = Result(
        name="example", digest="d" * 64, command="runner ablate example.yaml", machine={"cpu": "a CPU", "cores": 2},
        load=0.1, cases=cases, recommendations=(), slope=None, seconds=60.0, folder=str(folder), interrupted=False,
        published_by="somebody",
    )  # fmt: skip
    return replace(whole, **changes)
