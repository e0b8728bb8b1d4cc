"""Replay buffers: what a recipe says is in ``config``, the buffer itself comes from ``build.make_replay``."""
