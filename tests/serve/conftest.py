"""A server in a process of its own, for the tests of a module."""

import pytest
from serving import obedient, server, workspace_with


@pytest.fixture(scope="module")
def place(tmp_path_factory, migrated_database):
    """A workspace and the folder of a run in it, whose learner answers as it is told to."""
    workspace = workspace_with(tmp_path_factory.mktemp("served"), migrated_database)
    return workspace, obedient(workspace)


@pytest.fixture(scope="module")
def client(place, request):
    """A client of a server with the ``SETTINGS`` of the module."""
    with server(*place, *request.module.SETTINGS) as (_, client):
        yield client
