"""The verb ``serve``: a run's model, answering over HTTP."""

import os
import sys
from importlib.util import find_spec
from typing import Annotated

from typer import Argument, Exit, Option

from runner.cli import completion
from runner.cli.common import Plugins, Quiet, Sets, registry_of, say, settings, sharing_processor, working
from runner.system.errors import ExitCode, UsageError

EXTRA = "pip install 'proven-runner[serve]'"
"""Brings what serving needs."""
LIBRARIES = ("fastapi", "prometheus_client", "uvicorn")
Model = Annotated[
    str,
    Argument(
        metavar="MODEL", help="A run (name, digits or MLflow id), NAME@ALIAS or NAME/VERSION.",
        autocompletion=completion.runs,
    ),
]  # fmt: skip
RecipeAndSettings = Annotated[
    list[str] | None,
    Argument(
        metavar="[RECIPE] [A.B.C=VALUE...]", show_default=False, autocompletion=completion.recipes,
        help="A recipe whose sections inference and serve are used instead of the model's own; settings.",
    ),
]  # fmt: skip
Host = Annotated[str | None, Option(help="The same as serve.host=HOST.")]
Port = Annotated[int | None, Option(min=0, max=2**16 - 1, help="The same as serve.port=PORT; 0 takes a free one.")]


def serve(
    model: Model, bare: RecipeAndSettings = None, host: Host = None, port: Port = None, sets: Sets = None,
    plugin: Plugins = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Serve a model over HTTP until SIGTERM or Ctrl-C; what was asked before is still answered then.

    POST /predict asks it, in the form that /openapi.json describes; requests that come together are answered together.
    There are /health, /ready and /metrics, and at / the model's own page, if it has one. There is no password: it
    listens on 127.0.0.1 unless told.

    The exit code is 0 after SIGTERM, 130 after Ctrl-C, and 143 if an answer took longer than serve.drain_s.

    [bold]runner serve grasp_diffusion-3f2a91c0[/]

    [bold]runner serve grasps@champion grasp_serve serve.port=8080[/]
    """
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise UsageError(f"serving needs {', '.join(missing)}: {EXTRA}")
    recipe, given = (bare[0], bare[1:]) if bare and "=" not in bare[0] else (None, bare)
    own = {"serve.host": host, "serve.port": port}
    chosen = [*settings(sets, given), *(f"{name}={value}" for name, value in own.items() if value is not None)]
    with working("serve", f"loading {model}", quiet):
        from runner.serve.load import load
        from runner.serve.server import bound
        from runner.serve.server import serve as answer

        served, loaded = load(model, recipe, chosen, registry_of(plugin))
        listener = bound(loaded.serve)
    with sharing_processor(loaded):
        code = answer(served, loaded.serve, listener, lambda address: say(f"{served.name} answers on {address}"))
    if code is ExitCode.TERMINATED:  # a batch is still being computed, in a thread that nothing can end
        say("the model took too long: some requests were not answered")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise Exit(code)
