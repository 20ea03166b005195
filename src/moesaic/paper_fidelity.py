"""Fidelity of a model to a paper."""

from typing import Literal

__all__ = ["Fidelity"]

Fidelity = Literal["print", "released", "best"]
"""As printed in the paper, as in its authors' released code, or as we recommend."""
