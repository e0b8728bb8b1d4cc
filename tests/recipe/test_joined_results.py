import pytest

from runner.recipe.joined_results import COMPUTATION_NAME, accepted_drift, record_computation
from runner.system.errors import UsageError

STORED = {
    "code": {"runner": "1", "mine.py": "a" * 64},
    "plugins": {"model.net": f"mine.py {'a' * 64}"},
    "packages": {"torch": "2.10", "numpy": "2.4"},
}
CHANGES = [
    ({"code": {"runner": "1", "mine.py": "b" * 64}}, "code.mine.py: aaaaaaaaaaaa before, bbbbbbbbbbbb now"),
    ({"plugins": {"model.net": f"mine.py {'b' * 64}"}}, "plugins.model.net: mine.py aaaaaaaaaaaa before, mine.py bbbb"),
    ({"packages": {"torch": "2.11", "numpy": "2.4"}}, "packages.torch: 2.10 before, 2.11 now"),
    ({"packages": {"torch": "2.10"}}, "packages.numpy: 2.4 before, absent now"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_change_is_refused_unless_it_is_allowed(change, message):
    with pytest.raises(UsageError) as caught:
        accepted_drift("study 'mine'", STORED, STORED | change, is_allowed=False)
    assert message in str(caught.value)
    assert len(accepted_drift("study 'mine'", STORED, STORED | change, is_allowed=True)) == 1
    assert accepted_drift("study 'mine'", STORED, STORED, is_allowed=False) == []


def test_the_first_command_records_and_later_ones_compare(tmp_path):
    changed = STORED | {"code": {}}
    assert record_computation(tmp_path, "it", STORED, False) == []
    with pytest.raises(UsageError, match="--allow-drift"):
        record_computation(tmp_path, "it", changed, False)
    assert record_computation(tmp_path, "it", STORED, False) == []
    assert len(record_computation(tmp_path, "it", changed, True)) == 2
    # What was accepted is what the next command compares with.
    assert record_computation(tmp_path, "it", changed, False) == []
    assert [path.name for path in tmp_path.iterdir()] == [COMPUTATION_NAME]
