"""Models of families as a server answers with them: by many clients at once, and in a browser."""

import random
import re
from functools import cache, partial
from itertools import islice

import pytest
from browser import needs_browser, page
from serving import asked_together, server, small, workspace_with

from runner.plugin.registry import Registry
from runner.plugins.grasps.synthetic import synthetic_grasps
from runner.serve.load import load

COUNT = 64


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, migrated_database):
    return workspace_with(tmp_path_factory.mktemp("families"), migrated_database)


@pytest.fixture(scope="module")
def trained(workspace):
    """Returns the run of a recipe, trained once."""
    return cache(partial(small, workspace))


@pytest.fixture(scope="module")
def grasps(trained):
    return trained("grasp_diffusion")


def cloud(seed, points=32):
    """Points on a cube."""
    draw = random.Random(seed)
    places = [[draw.uniform(-0.03, 0.03) for _ in range(3)] for _ in range(points)]
    for place in places:
        place[draw.randrange(3)] = draw.choice((-0.03, 0.03))
    return places


def grasp_questions():
    """Of several shapes, each with a seed of its own; some ask for the same with another seed."""
    for number in range(COUNT):
        asked = {"cloud": cloud(number // 2, 32 + number % 2), "seed": number, "grasps": 1 + number % 3}
        yield asked | ({"steps": 2} if number % 5 == 0 else {}) | ({"edge": 0.06} if number % 7 == 0 else {})


def image_questions():
    draw = random.Random(0)
    return ({"image": [[[draw.random() for _ in range(8)] for _ in range(8)]]} for _ in range(COUNT))


def text_questions():
    """Of several lengths; some ask for the same with another seed."""
    draw = random.Random(0)
    for number in range(COUNT):
        prompt = "".join(draw.choices("abcdefgh ", k=1 + number % 3))
        yield {"prompt": prompt, "seed": number, "characters": 10 + 10 * (number % 2), "temperature": 1.5}


def numbers(answer):
    """Every number in an answer, in order."""
    if isinstance(answer, dict):
        answer = [*answer.values()]
    if isinstance(answer, list):
        return [number for each in answer for number in numbers(each)]
    return [answer] if isinstance(answer, float) else []


QUESTIONS = {
    "grasp_diffusion": grasp_questions,
    "digits_classifier": image_questions,
    "shakespeare_gpt": text_questions,
    "mamba2_shakespeare": text_questions,
}


@pytest.mark.parametrize(("name", "questions"), QUESTIONS.items())
def test_many_at_once_get_the_answers_that_each_would_get_alone(workspace, monkeypatch, trained, name, questions):
    monkeypatch.setenv("RUNNER_WORKSPACE", str(workspace.root))
    run = trained(name)
    model, _ = load(str(run), None, [], Registry())
    asked = [*questions()]
    alone = [model.response.model_validate_json(model.answers([model.request(**each)])[0]) for each in asked]
    with server(workspace, run, "serve.wait_ms=20") as (_, client):
        together = asked_together(client, asked)
        sizes = client.get("/metrics").text
    assert [response.status_code for response in together] == [200] * COUNT
    for response, expected in zip(together, alone, strict=True):
        # An untrained network's rotations are made of short columns, which rounds more; another answer is 0.1 off.
        close = pytest.approx(numbers(expected.model_dump(mode="json")), abs=1e-3, rel=1e-3)
        assert numbers(response.json()) == close
        assert response.json().get("text") == getattr(expected, "text", None)
    assert float(re.search(r"^runner_batch_size_count (\S+)$", sizes, re.MULTILINE)[1]) < COUNT
    assert len({response.text for response in together}) == COUNT


@pytest.mark.parametrize(("name", "questions"), QUESTIONS.items())
def test_with_bit_exact_others_do_not_change_a_digit(workspace, trained, name, questions):
    asked = [*islice(questions(), 36)]
    with server(workspace, trained(name), "serve.bit_exact=true") as (_, client):
        alone = [client.post("/predict", json=question).text for question in asked]
        together = [response.text for response in asked_together(client, asked)]
        sizes = client.get("/metrics").text
    assert together == alone
    assert f"runner_batch_size_sum {2 * len(asked)}.0" in sizes
    assert f"runner_batch_size_count {2 * len(asked)}.0" in sizes


def test_what_grasps_cannot_be_asked(workspace, grasps, monkeypatch):
    monkeypatch.setenv("RUNNER_WORKSPACE", str(workspace.root))
    model, _ = load(str(grasps), None, [], Registry())
    assert model.learner.refused(model.request(cloud=cloud(0), steps=3)) is None
    assert "has 4 levels of noise" in model.learner.refused(model.request(cloud=cloud(0), steps=5))
    assert "needs at least 4" in model.learner.refused(model.request(cloud=cloud(0, 3)))


def test_what_a_language_model_cannot_be_asked(workspace, trained, monkeypatch):
    monkeypatch.setenv("RUNNER_WORKSPACE", str(workspace.root))
    model, _ = load(str(trained("shakespeare_gpt")), None, [], Registry())
    assert model.learner.refused(model.request(prompt="to be")) is None
    assert model.learner.refused(model.request(prompt="日本日")) == "prompt: this model has never seen '日', '本'"


def test_the_same_seed_gives_the_same_grasps_and_another_one_others(workspace, grasps, monkeypatch):
    monkeypatch.setenv("RUNNER_WORKSPACE", str(workspace.root))
    model, _ = load(str(grasps), None, [], Registry())
    first, again, other = (model.request(cloud=cloud(0), seed=seed, grasps=2, boxes=True) for seed in (1, 1, 2))
    answers = [model.response.model_validate_json(each) for each in model.answers([first, again, other])]
    first, again, other = (numbers(each.model_dump(mode="json")) for each in answers)
    assert first == pytest.approx(again, abs=1e-5)
    assert first != pytest.approx(other, abs=1e-2)
    assert [len(grasp.boxes) for grasp in answers[0].grasps] == [len(answers[0].half_sizes)] * 2


@needs_browser
def test_the_page_draws_a_hand_and_says_what_its_grasps_are_worth(workspace, grasps, tmp_path):
    with server(workspace, grasps) as (_, client):
        options = "--use-angle=swiftshader", "--enable-unsafe-swiftshader"
        document = page(str(client.base_url), tmp_path, *options)
        asked = client.get("/metrics").text
    assert 'runner_requests_total{status="200"} 1.0' in asked
    assert re.search(r'id="model">grasp_diffusion-\w{8}<', document)
    assert re.search(r'id="summary">\d+ strict and \d+ more valid of 16, in \d+ ms<', document)
    assert re.search(r'id="facts">Grasp \d+: \w+, [\d.]+ mm deep, \d+ links within 5 mm<', document)
    assert len(re.findall(r'role="radio"', document)) == 16
    assert re.search(r'id="trouble"[^>]* hidden', document)
    triangles = int(re.search(r'data-triangles="(\d+)"', document)[1])
    boxes = len(synthetic_grasps()["half_size"])
    assert triangles == 12 * (boxes + 1)  # the hand's, and the cube
