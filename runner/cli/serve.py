"""The command ``serve``: answers requests to a model over HTTP."""

import os
import sys
from importlib.util import find_spec
from typing import Annotated

from typer import Argument, Exit, Option

from runner.cli import completion
from runner.cli.common import (
    Plugins,
    Quiet,
    Sets,
    registry_of,
    say,
    settings,
    sharing_processor,
    working,
)
from runner.system.errors import ExitCode, UsageError

EXTRA = "pip install 'proven-runner[serve]'"
"""Brings what serving needs."""
LIBRARIES = ("fastapi", "prometheus_client", "uvicorn")
Model = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="Run (name, digits or MLflow id), NAME@ALIAS or NAME/VERSION.",
        autocompletion=completion.runs,
    ),
]
RecipeAndSettings = Annotated[
    list[str] | None,
    Argument(
        metavar="[RECIPE] [A.B.C=VALUE...]",
        show_default=False,
        autocompletion=completion.recipes,
        help="Recipe whose sections inference and serve replace those of the model; settings.",
    ),
]
Host = Annotated[str | None, Option(help="The same as serve.host=HOST.")]
Port = Annotated[
    int | None,
    Option(min=0, max=2**16 - 1, help="The same as serve.port=PORT; 0 chooses a free port."),
]


def serve(
    model: Model,
    bare: RecipeAndSettings = None,
    host: Host = None,
    port: Port = None,
    sets: Sets = None,
    plugin: Plugins = None,
    quiet: Quiet = False,
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C, after which pending requests are still answered.

    The page at / sends requests from a browser, /docs documents the API, and a working curl command
    is printed. POST /predict answers requests; requests that arrive together are computed as one
    batch. Other paths: /health, /ready, /metrics. Requests need no password: the server listens on
    127.0.0.1 unless serve.host is another address.

    Exit codes: 0 after SIGTERM, 130 after Ctrl-C, 143 if an answer took longer than serve.drain_s.

    [bold]runner serve grasp_diffusion-3f2a91c0[/]

    [bold]runner serve grasps@champion grasp_serve serve.port=8080[/]
    """
    # Checked before the model is loaded, which may take long.
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise UsageError(f"serving needs {', '.join(missing)}: {EXTRA}")
    recipe = None
    if bare and "=" not in bare[0]:
        recipe, *bare = bare
    assignments = settings(sets, bare)
    if host is not None:
        assignments.append(f"serve.host={host}")
    if port is not None:
        assignments.append(f"serve.port={port}")
    with working("serve", f"loading {model}", quiet):
        from runner.serve.example import curl_command
        from runner.serve.load import load
        from runner.serve.server import bound
        from runner.serve.server import serve as answer

        served, loaded = load(model, recipe, assignments, registry_of(plugin))
        listener = bound(loaded.serve)

    def announce(address: str) -> None:
        say(f"{served.name} answers on {address}")
        say(f"try it: {curl_command(address, served.example)}")

    with sharing_processor(loaded):
        code = answer(served, loaded.serve, listener, announce)
    for note in served.closing_notes():
        say(note)
    if code is ExitCode.TERMINATED:
        # A batch is still being computed, in a thread that nothing can end.
        say("some requests were not answered: the model took longer than serve.drain_s")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise Exit(code)
