"""Ways to compute a recurrence faster."""
