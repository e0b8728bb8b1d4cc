"""The page of a served radiance field: real drags in a browser, and what the server receives."""

import base64
import re

import pytest
import torch
from browser import needs_browser
from browser_session import browser_session
from pydantic import ValidationError
from running import tiny
from serving import server, small, workspace_with

from runner.plugins.radiance.camera import camera_from_angles
from runner.plugins.radiance.served import ViewRequest, latents_of, responses_of
from runner.training.pipeline import assemble


@pytest.fixture(scope="module")
def learner():
    return assemble(tiny("graf")).learner


@pytest.mark.parametrize("seed", range(50))
def test_a_view_follows_from_its_request_alone(learner, seed):
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.rand(3, 2, generator=draw).tolist()
    requests = [ViewRequest(label=index % 2, u=u, v=v, seed=seed * 7 + index) for index, (u, v) in enumerate(numbers)]
    together = learner.requested(requests)
    alone = learner.requested(requests[1:2])
    assert all(torch.equal(table[1:2], alone[name]) for name, table in together.items())
    torch.testing.assert_close(together["camera"], camera_from_angles(torch.tensor(numbers), 2.5), atol=1e-5, rtol=0)
    assert torch.equal(latents_of(requests, 5)[0], latents_of([ViewRequest(seed=seed * 7)], 5)[0])


def test_a_response_has_the_bytes_of_the_image():
    image = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    first, second = responses_of(image, ("spot", "mug"))
    assert (first.side, first.classes) == (4, ["spot", "mug"])
    decoded = torch.frombuffer(bytearray(base64.b64decode(second.rgb)), dtype=torch.uint8).view(4, 4, 3)
    expected = (image[1].permute(1, 2, 0) + 1) * 127.5
    assert (decoded - expected).abs().max() <= 0.5


def test_a_class_that_does_not_exist_is_refused(learner):
    assert learner.refused(ViewRequest(label=1)) is None
    assert learner.refused(ViewRequest(label=2)) == "label: 2 exceeds the largest class of this model (1)"


@pytest.mark.parametrize("values", [{"u": -0.1}, {"u": 1.1}, {"v": 2.0}, {"seed": -1}, {"label": -1}, {"w": 1}])
def test_other_requests_are_invalid(values):
    with pytest.raises(ValidationError):
        ViewRequest(**values)


@needs_browser
def test_a_drag_turns_the_object_with_one_request_at_a_time(tmp_path, migrated_database):
    workspace = workspace_with(tmp_path, migrated_database)
    steps = 60
    with server(workspace, small(workspace, "graf")) as (_, client), browser_session(tmp_path) as session:
        session.open(str(client.base_url).rstrip("/") + "/", 1000, 700)
        session.wait_until("document.body.dataset.renders >= 1")
        before = session.evaluate("document.getElementById('pose').textContent")
        # Of the styles that all pages share.
        assert session.evaluate("getComputedStyle(document.querySelector('form')).display") == "flex"
        session.drag((200, 300), (320, 240), steps)
        session.wait_until("document.getElementById('pose').textContent.startsWith('Azimuth 306°')")
        after = session.evaluate("document.getElementById('pose').textContent")
        assert before == "Azimuth 36°, elevation 17°"
        # The mouse went a quarter turn to the right, and a tenth of v up.
        assert after == "Azimuth 306°, elevation 6°"

        names = session.evaluate(
            "[...document.querySelectorAll('#classes button')].map((button) => button.textContent)"
        )
        assert names == ["low box", "tall box"]
        session.click("#classes button:nth-child(2)")
        session.wait_until("document.querySelector('#classes button:nth-child(2)').ariaChecked === 'true'")
        session.click("#another")
        session.wait_until("document.getElementById('seed').value !== '0'")
        assert session.evaluate("document.getElementById('trouble').hidden")
        assert session.evaluate("document.getElementById('view').width") == 16
        metrics = client.get("/metrics").text
        # Steps of the mouse that come while a view is rendered need no request.
        count = float(re.search(r'runner_requests_total{status="200"} (\S+)', metrics)[1])
        assert 3 <= count <= 1 + steps + 2
