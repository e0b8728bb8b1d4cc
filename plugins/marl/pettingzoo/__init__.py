"""Environments of PettingZoo as a simulator."""
