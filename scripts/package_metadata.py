"""Metadata of the Python package that follows from the machine it is built on; the build calls this (tool.dynamic-metadata)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The dependencies: the torch that the library is built against, as it calls torch's C++ functions."""
    del settings, project
    minor = ".".join(importlib.metadata.version("torch").split(".")[:2])
    return {"dependencies": [f"torch=={minor}.*", "numpy"]}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """A source archive does not know them yet."""
    del settings
    return {"dependencies": True}
