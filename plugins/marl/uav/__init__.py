"""Leader-follower path planning of unmanned aerial vehicles (UAVs)."""
