"""Ops and fusions that users write in Python: what they must define, how compiled code knows them, and how the library calls them."""
