"""Small honest training steps of many kinds, each with honest ways to rewrite it."""

from zoo import dense, generative, images, reinforcement, structures, tokens, updates
from zoo.model import MODELS, Loop, Model

__all__ = [
    "MODELS",
    "Loop",
    "Model",
    "dense",
    "generative",
    "images",
    "reinforcement",
    "structures",
    "tokens",
    "updates",
]
