"""Training: pipeline, training step, guards, checkpoints and resumption."""
