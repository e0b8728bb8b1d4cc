"""The pages of servers, in a browser: a form for any model, a field for drawings, and the API's documentation."""

import json
import re
import shlex

import pytest
from browser import needs_browser, page
from browser_session import browser_session
from serving import OBEDIENT, PLUGINS, server, small, trained, workspace_with

ELSEWHERE = re.compile(r"""(?:src|href|url\()\s*=?\s*["']?(?:https?:)?//(?!127\.0\.0\.1)""")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, migrated_database):
    return workspace_with(tmp_path_factory.mktemp("pages"), migrated_database)


@pytest.fixture(scope="module")
def digits(workspace):
    with server(workspace, small(workspace, "digits_classifier")) as (child, client):
        yield child, client


@needs_browser
def test_a_model_without_a_page_has_a_form_from_its_schema(workspace, tmp_path):
    recipe = workspace.root.parent / "plain.yaml"
    recipe.write_text(OBEDIENT.replace("toy_obedient", "toy_plain").replace("name: obedient", "name: plain"))
    run = trained(workspace, recipe, plugins=PLUGINS)
    with server(workspace, run) as (_, client):
        document = page(str(client.base_url), tmp_path)
    for name in ("words", "fail", "passes"):
        assert f'id="field-{name}"' in document
    assert run.name in document
    assert "curl -s" in document
    assert re.search(r'id="trouble"[^>]* hidden', document)
    assert not ELSEWHERE.search(document)


@needs_browser
def test_an_image_is_classified_as_it_is_shown(digits, tmp_path):
    _, client = digits
    document = page(f"{client.base_url}#example", tmp_path)
    assert re.search(r'id="label"[^>]*>Class \d, [\d.]+ %<', document)
    assert document.count("<meter") == 10
    assert not ELSEWHERE.search(document)


def test_the_command_that_serve_prints_works(digits):
    child, client = digits
    printed = re.search(r"^try it: (.*)$", child.stderr, re.MULTILINE)[1]
    words = shlex.split(printed)
    response = client.post("/predict", json=json.loads(words[-1]))
    assert response.status_code == 200
    assert client.get("/model").json()["curl"] == printed
    assert client.get("/example").json() == json.loads(words[-1])


@needs_browser
def test_the_documentation_is_fastapis_and_loads_nothing_from_elsewhere(digits, tmp_path):
    pytest.importorskip("fastapi_offline")
    _, client = digits
    response = client.get("/docs")
    assert not ELSEWHERE.search(response.text)
    policy = response.headers["content-security-policy"]
    assert policy.startswith("script-src 'self' 'sha256-")
    assert "unsafe-inline" not in policy.partition(";")[0]
    document = page(f"{str(client.base_url).rstrip('/')}/docs", tmp_path)
    assert "swagger-ui" in document
    assert "/predict" in document


DROP = """
const picture = document.createElement("canvas");
picture.width = picture.height = 8;
picture.toBlob((blob) => {
  const data = new DataTransfer();
  data.items.add(new File([blob], "transparent.png", {type: "image/png"}));
  document.getElementById("grid").dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
});
0
"""
DARKEST = """
Math.min(...document.getElementById("grid").getContext("2d").getImageData(0, 0, 8, 8).data)
"""


@needs_browser
def test_a_transparent_image_is_shown_on_white(digits, tmp_path):
    _, client = digits
    with browser_session(tmp_path) as session:
        address = f"{client.base_url}/#example".replace("//#", "/#")
        session.open(address, 1200, 900)
        session.wait_until("document.getElementById('label').textContent.startsWith('Class')")
        assert session.evaluate(DARKEST) == 0
        session.evaluate(DROP)
        session.wait_until(f"{DARKEST.strip()} === 255")
