"""The default cache directory: decoded images, tuned tile sizes."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_ENV_VAR", "default_cache_dir"]

CACHE_ENV_VAR = "MOESAIC_CACHE"
"""Environment variable with the path of the cache directory."""


def default_cache_dir() -> Path:
    """The directory in MOESAIC_CACHE, or ``~/.cache/moesaic``."""
    path = os.environ.get(CACHE_ENV_VAR)
    if path:
        return Path(path)
    try:
        return Path.home() / ".cache" / "moesaic"
    except RuntimeError as fault:
        raise FileNotFoundError(
            f"there is no home directory for the cache ({fault}); set {CACHE_ENV_VAR} to a directory"
        ) from fault
