"""The collector pauses while modules are imported."""

import gc

import pytest

from runner.system.garbage import importing


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("was_enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_pauses_and_is_as_before_afterwards(was_enabled, fails):
    gc.unfreeze()
    if not was_enabled:
        gc.disable()
    try:
        with importing():
            assert not gc.isenabled()
            if fails:
                raise ImportError
    except ImportError:
        assert fails
    assert gc.isenabled() is was_enabled
    # What exists by then is never looked at again.
    assert gc.get_freeze_count() > 1_000
