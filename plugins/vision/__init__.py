"""Images and what is on them."""
