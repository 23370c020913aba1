"""Differential tests against torch's operations: random pipelines, and random calls of attention.

`python -m differential --help` and `python -m differential.attention --help`, from the folder `tests`.
"""
