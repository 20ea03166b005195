"""How closely a paper's model is followed."""

from typing import Literal

__all__ = ["Fidelity"]

Fidelity = Literal["print", "released", "best"]
"""As the paper prints it, as its authors' code does it, or as we recommend it."""
