"""Trains one model with several processes: their group, gradients, failures and launcher."""
