"""Two processes that exchange border nodes train like the one process that counts their bytes."""

import pytest
import torch
from divided_graph import trained
from process_pairs import started_pair
from test_gcn import file as file  # the fixture of a small graph

UPDATES = 9


@pytest.fixture(scope="module")
def pair():
    with started_pair() as pair:
        yield pair


@pytest.mark.parametrize("exchange", ["full_halo", "historical", "emma"])
def test_bytes_that_are_counted_are_those_on_the_wire(pair, file, exchange):
    sets = (f"model.exchange={exchange}", "model.chunks=4", "data.parts=2", f"data.file={file}")
    single = trained(None, sets, UPDATES)
    first, second = pair.call(trained, sets, UPDATES)
    sent = [one + other for one, other in zip(first["sent"], second["sent"], strict=True)]
    assert sent == single["counted"] == first["counted"]
    assert min(first["sent"][0], second["sent"][0]) > 0
    assert first["losses"] == pytest.approx(single["losses"], rel=1e-5)
    for name, value in single["parameters"].items():
        assert torch.equal(first["parameters"][name], second["parameters"][name])
        assert torch.allclose(first["parameters"][name], value, atol=1e-5)
    # Gradients of values that were sent travel back.
    assert first["backward"] + second["backward"] == sum(sent)
