"""State dicts besides those that modules give by themselves: the state of recipes, and the keys of TransformerEngine."""
