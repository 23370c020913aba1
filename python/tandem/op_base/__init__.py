"""What pipelines know of an op: its options, tensors, channels and directions."""
