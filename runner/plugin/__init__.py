"""Base classes of plugins: configurations, contracts, implementations, and the registry."""
