"""What to do when a file cannot be written: a full disk, a folder that is gone and a read-only one differ."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["way_out"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


def way_out(error: OSError, path: str | os.PathLike[str]) -> str:
    """Returns what to do about a file that could not be written, as a clause that begins a sentence.

    >>> way_out(OSError(errno.ENOSPC, "No space left on device"), "runs/a/model.safetensors")
    'Free space on that disk'
    >>> way_out(FileNotFoundError(errno.ENOENT, "No such file or directory"), "not-there/model.safetensors")
    'The folder not-there is gone: it was removed or renamed; put it back'
    """
    folder = Path(path).parent
    if error.errno in _FULL:
        return "Free space on that disk"
    if error.errno == errno.EFBIG:
        return "Raise the limit on the size of files (ulimit -f)"
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and not folder.is_dir():
        return f"The folder {folder} is gone: it was removed or renamed; put it back"
    if error.errno in _FORBIDDEN:
        return f"Make the folder {folder} writable"
    return "Check that disk"
