"""Contexts that are in force in a `with` block or a call: recipes, memory budgets, and activation checkpointing under them."""
