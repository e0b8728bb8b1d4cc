"""A trained model with the stages of a recipe's `inference`: made, proven and measured."""
