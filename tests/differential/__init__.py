"""Differential testing against plain torch: random pipelines, and random calls of attention.

`python -m differential --help` and `python -m differential.attention --help`, from the folder `tests`.
"""
