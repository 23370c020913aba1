"""Tensors in codes: the type, the quantizers that make them, and parameters that are such."""
