"""What MLflow's page says in words about a run: what it is, what it came to, and what to do with it."""

from collections.abc import Mapping

DESCRIPTION = "mlflow.note.content"
"""The tag that MLflow shows as the description, in Markdown."""


def describe(facts: Mapping[str, str]) -> str:
    """A list of facts by what they are about, in Markdown; what has nothing to say is left out."""
    return "\n".join(f"* **{about}**: {fact}" for about, fact in facts.items() if fact)


def code(*texts: str) -> str:
    """Texts that Markdown shows as they are, one after the other; nothing where all are empty."""
    return ", ".join(f"`{text}`" for text in texts if text)
