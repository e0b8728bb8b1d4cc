"""Replay buffers: the settings are in ``config``, the buffer is created by
``build.make_replay``.
"""
