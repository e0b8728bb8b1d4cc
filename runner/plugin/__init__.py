"""What a plugin is: its configuration, its contract, its parts, and where plugins are found."""
