"""Runs of ops as pipelines: preparation, pieces, calls and reports."""
