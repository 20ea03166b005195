"""Where moesaic keeps what it would otherwise compute again: decoded pictures, tile sizes that were measured."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_ENV_VAR", "default_cache_dir"]

CACHE_ENV_VAR = "MOESAIC_CACHE"
"""The environment variable that names the folder for caches."""


def default_cache_dir() -> Path:
    """The folder in the variable MOESAIC_CACHE, or ``.cache/moesaic`` in the home folder."""
    told = os.environ.get(CACHE_ENV_VAR)
    if told:
        return Path(told)
    try:
        return Path.home() / ".cache" / "moesaic"
    except RuntimeError as fault:
        raise FileNotFoundError(
            f"there is no home folder for the cache ({fault}); name a folder in {CACHE_ENV_VAR}"
        ) from fault
