"""Multi-agent reinforcement learning: learner, replay and environments."""
