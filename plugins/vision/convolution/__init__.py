"""Two-dimensional convolutions by several algorithms."""
