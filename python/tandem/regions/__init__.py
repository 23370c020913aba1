"""What is in force inside a `with` block, or a call: recipes, memory budgets, and the recomputation of activations under them."""
