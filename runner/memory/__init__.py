"""Memory of an update: predicted, attributed and budgeted."""
