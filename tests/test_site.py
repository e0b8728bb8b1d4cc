"""The built site in a browser: the search ranks the right page first, and no table splits a word.

``.ci/run`` builds the site and runs these tests; without a built site they are skipped.
"""

import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import needs_browser
from browser_session import browser_session

SITE = Path(__file__).parents[1] / ".site"
RANKED_FIRST = {
    "install": "docs/installation.html",
    "learning rate": "docs/training.html",
    "early stopping": "docs/training.html",
    "out of memory": "docs/plan.html",
    "glossary": "docs/glossary.html",
    "log_every": "docs/recipe_keys.html",
}
WIDTHS = (400, 1400)
TYPE_QUERY = """(() => {
    const input = document.querySelector(".md-search__input");
    input.focus();
    input.value = QUERY;
    input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
})()"""
RESULTS = "[...document.querySelectorAll('.md-search-result__item > a')].map(link => link.href)"
SPLIT_WORDS = """(() => {
    const words = [];
    for (const cell of document.querySelectorAll(".md-typeset td")) {
        const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
            for (const match of walker.currentNode.data.matchAll(/[A-Za-z0-9_]+/g)) {
                const range = document.createRange();
                range.setStart(walker.currentNode, match.index);
                range.setEnd(walker.currentNode, match.index + match[0].length);
                const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
                if (lines.size > 1) words.push(match[0]);
            }
        }
    }
    return words;
})()"""

pytestmark = [needs_browser, pytest.mark.skipif(not SITE.is_dir(), reason="build it: mkdocs build --strict")]


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a line for each request."""

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_the_search_ranks_the_right_page_first(address, tmp_path):
    first = {}
    with browser_session(tmp_path) as session:
        for query, page in RANKED_FIRST.items():
            session.open(f"{address}index.html?{len(first)}", 1400, 900)
            session.wait_until("document.querySelector('.md-search__input')")
            session.evaluate(TYPE_QUERY.replace("QUERY", json.dumps(query)))
            session.wait_until(f"{RESULTS}.length > 0")
            first[query] = session.evaluate(RESULTS)[0].removeprefix(address).partition("?")[0]
            assert (SITE / page).is_file()
    assert first == RANKED_FIRST


@pytest.mark.parametrize("page", ["index.html", "docs/commands.html", "docs/recipe_keys.html", "docs/stages.html"])
def test_no_word_is_split_in_a_table(address, tmp_path, page):
    with browser_session(tmp_path) as session:
        words = {}
        for width in WIDTHS:
            session.open(f"{address}{page}?{width}", width, 900)
            words[width] = session.evaluate(SPLIT_WORDS)
    assert words == {width: [] for width in WIDTHS}
