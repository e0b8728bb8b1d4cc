"""PyTorch training experiments declared in YAML, whose speed-ups are proven."""

__version__ = "0.1.0"
