"""State dicts that modules do not have themselves: the state of recipes, and states under TransformerEngine's keys."""
