"""Triton's interpreter, in which its kernels run on a CPU."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def patch_interpreter() -> None:
    """Triton 3.6's interpreter takes int() of arrays of one element, which NumPy no longer allows from 2.4 on."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if INTERPRETED:
    patch_interpreter()
