"""Runs a part of the runner in a child process: ``spawn`` is the parent's side,
``protocol`` the child's.
"""
