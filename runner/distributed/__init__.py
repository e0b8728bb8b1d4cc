"""One training on several processes: the group, its gradients, its failures, and its launcher."""
