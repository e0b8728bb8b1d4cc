"""What people look at: progress, closing table, comparison."""
