"""The description of a run on MLflow's page: recipe, result, and commands."""

from collections.abc import Mapping

DESCRIPTION = "mlflow.note.content"
"""The tag that MLflow shows as the description, in Markdown."""


def describe(facts: Mapping[str, str]) -> str:
    """Formats facts by topic as a Markdown list, without empty ones."""
    return "\n".join(f"* **{about}**: {fact}" for about, fact in facts.items() if fact)


def code(*texts: str) -> str:
    """Texts that Markdown shows as they are, one after the other; nothing where all are empty."""
    return ", ".join(f"`{text}`" for text in texts if text)
