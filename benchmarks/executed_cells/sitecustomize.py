"""Logs each cell that a process runs, for benchmarks/sweeps.py: this folder is in PYTHONPATH of the commands there.

Python imports this module when it starts. When moesaic's result cache is imported, its `run` is wrapped: a line of the
file in EXECUTED_CELLS when a cell begins, and one when it is stored. Lines are appended at once, so that those of a
process that is killed are there.
"""

import importlib.abc
import importlib.util
import os
import sys

_MODULE = "moesaic.training.result_cache"


def _log(what, spec):
    from moesaic.training.result_cache import cell_digest

    file = os.open(os.environ["EXECUTED_CELLS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"{what} {cell_digest(spec)} {os.getpid()}\n".encode())
    os.close(file)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        load = found.loader.exec_module

        def exec_module(module):
            load(module)
            run = module.ResultCache.run

            def logged(self, name, spec, work):
                if self.folder.name != "cells":  # decisions of a shared budget
                    return run(self, name, spec, work)
                _log("begin", spec)
                result = run(self, name, spec, work)
                _log("end", spec)
                return result

            module.ResultCache.run = logged

        found.loader.exec_module = exec_module
        return found


if "EXECUTED_CELLS" in os.environ:
    sys.meta_path.insert(0, _Finder())
