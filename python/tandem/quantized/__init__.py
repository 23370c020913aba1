"""Quantized tensors: the tensor class, the quantizers, and quantized parameters."""
