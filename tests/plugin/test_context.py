"""What the processes of one training have alone, and what they have in common."""

from itertools import product
from types import SimpleNamespace

import torch

from runner.plugin.context import Context, Slots


def of_process(rank, count):
    """Returns the context of a process; of a single one without a count."""
    processes = SimpleNamespace(rank=rank, count=count) if count else None
    return Context(torch.device("cpu"), Slots(), 3, processes=processes)


def drawn(generator):
    return torch.rand(4, generator=generator).tolist()


def test_each_process_draws_other_numbers_from_its_generator():
    contexts = [of_process(rank, 3) for rank in range(3)]
    numbers = [drawn(context.process_generator("starts")) for context in contexts]
    assert len({tuple(values) for values in numbers}) == 3
    assert numbers[1] == drawn(of_process(1, 3).process_generator("starts"))
    # All processes have the others in common, and a single process has no other ones.
    assert len({tuple(drawn(context.generator("parameters"))) for context in contexts}) == 1
    single = of_process(0, 0)
    assert drawn(single.process_generator("starts")) == drawn(of_process(0, 0).generator("starts"))


def test_parts_of_processes_are_everything_and_differ_by_one():
    for total, count in product(range(30), range(1, 6)):
        parts = [of_process(rank, count).process_part(total) for rank in range(count)]
        assert sum(parts) == total
        assert max(parts) - min(parts) <= 1
    tensor = torch.ones(2)
    assert of_process(0, 0).process_part(7) == 7
    assert of_process(0, 0).sum_over_processes(tensor) is tensor
    assert of_process(0, 0).min_over_processes(tensor) is tensor
