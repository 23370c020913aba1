"""Metadata of the Python package that depends on the machine where it is built. The build calls this (tool.dynamic-metadata)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The dependencies. They include the torch that the library is built against, because the library calls torch's C++ functions."""
    del settings, project
    minor = ".".join(importlib.metadata.version("torch").split(".")[:2])
    return {"dependencies": [f"torch=={minor}.*", "numpy"]}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Which fields only a wheel has: a source archive cannot know the dependencies."""
    del settings
    return {"dependencies": True}
