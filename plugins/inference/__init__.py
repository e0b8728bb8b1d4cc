"""Stages that make a finished run's answers faster or smaller, for every learner with the slot
``forward``.
"""
