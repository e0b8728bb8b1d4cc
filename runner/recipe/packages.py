"""Versions of the packages that a run finds: those that compute, and those that are tools around the computation."""

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from typing import NamedTuple

_OWN = "proven-runner"
_COMPUTES = ("torch", "numpy")
_TOOL_EXTRAS = frozenset({"nvidia", "plots"})
"""Extras of the runner that no result depends on; any other one brings what computes (environments)."""
_DEVELOPMENT = frozenset({"dev", "docs", "lint", "test", "testing", "tests"})
"""Extras that no run uses."""


class _Distribution(NamedTuple):
    version: str | None
    """None if it is not installed."""
    needs: list[tuple[str, set[str]]]
    """Its requirements by normalised name, each with the extras that bring it."""


def versions(providers: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """What is installed, by normalised name.

    An extra is taken to be in use as far as its packages are installed.

    Args:
        providers: the distributions of the plugins in use; what is none, such as a file, is passed over.

    Returns:
        Versions of the packages that can change a result, with everything they need: torch, numpy, the distributions
        of plugins, environments. Then those of all others that the runner and its other requirements need.
    """
    others = {_normalised(provider) for provider in providers} - {_OWN}
    computing = {*_COMPUTES, *others}
    computing |= {name for other in others for name, extras in _find(other).needs if extras - _DEVELOPMENT}
    own = _find(_OWN).needs
    computing |= {name for name, extras in own if extras - _TOOL_EXTRAS - _DEVELOPMENT}
    tools = {_OWN} | {name for name, extras in own if extras & _TOOL_EXTRAS}
    # A plugin needs the runner, but not the runner's tools: the closure ends there.
    packages = _closure(computing, {_OWN})
    return packages, _closure(tools, packages)


def _closure(roots: Iterable[str], without: Iterable[str]) -> dict[str, str]:
    """Versions of these distributions and of all that they need, as far as they are installed."""
    found: dict[str, str] = {}
    seen, queue = set(without), list(roots)
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            version, needs = _find(name)
            queue += [need for need, extras in needs if not extras]
            if version is not None:
                found[name] = version
    return dict(sorted(found.items()))


def _find(name: str) -> _Distribution:
    """What the environment says of a distribution, or of the name of a file."""
    try:
        metadata = distribution(name).metadata  # parsed at every access
    except (PackageNotFoundError, ValueError):
        return _Distribution(None, [])
    except FileNotFoundError:  # what the backport of importlib.metadata, once imported, says of one without metadata
        return _Distribution("unknown", [])
    needs = []
    for requirement in metadata.get_all("Requires-Dist", ()):
        extras = set(re.findall(r"""extra\s*==\s*["']([^"']+)["']""", requirement))
        needs.append((_normalised(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]), extras))
    return _Distribution(str(metadata.get_all("Version", ["unknown"])[0]), needs)


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
