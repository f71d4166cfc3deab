"""Where KDA_FLA is set, our operators join flash-linear-attention's dispatch as soon as a program imports its KDA.

PyTorch calls `start` at the end of `import torch`, as an entry point of the group `torch.backends`; with
TORCH_DEVICE_BACKEND_AUTOLOAD=0 it does not. This stands outside of the package so that it costs a program that does not
want it nothing: the package itself is imported only once FLA's KDA is.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

VARIABLE, MODULE = "KDA_FLA", "fla.ops.kda"


def start() -> None:
    """Wait for the import of FLA's KDA, if KDA_FLA says so."""
    if os.environ.get(VARIABLE, "").lower() not in ("", "0", "false", "no", "off"):
        sys.meta_path.insert(0, _Waiting())


class _Waiting(MetaPathFinder):
    """Finds nothing itself, but lets registration follow the import of FLA's KDA."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and (loader := spec.loader) is not None:
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                from kda import fla

                fla.register()

            loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
