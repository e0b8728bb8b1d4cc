"""Is a change of a training step harmless? For any PyTorch loop; no recipe is needed."""
