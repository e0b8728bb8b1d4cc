"""The server reports what answered: the program of a stage, or the network itself."""

from dataclasses import dataclass

from runner.serve.metrics import ServerMetrics
from runner.serve.model import ServedModel


@dataclass
class Exported:
    program_bytes: int
    program_calls: int
    network_calls: int

    def closing_notes(self):
        return ["2 questions of another form"] if self.network_calls else []


def test_calls_of_all_copies_are_counted_by_stage():
    stages = (("export", Exported(9, 5, 2)), ("export", Exported(9, 1, 0)), ("ddim", Exported(0, 0, 0)))
    model = ServedModel("it", None, None, None, None, {}, stages=stages)
    assert model.program_calls() == {("export", "program"): 6, ("export", "network"): 2}
    assert model.closing_notes() == ["export: 2 questions of another form"]
    metrics = ServerMetrics()
    metrics.watch_programs(model.program_calls)
    text = metrics.text().decode()
    assert 'runner_network_calls_total{answered_by="program",stage="export"} 6.0' in text
    assert 'runner_network_calls_total{answered_by="network",stage="export"} 2.0' in text
    assert "ddim" not in text
