"""Differential testing: random pipelines against plain torch. `python -m differential --help`, from the folder `tests`."""
