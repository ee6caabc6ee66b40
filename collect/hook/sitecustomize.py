"""Turns the start of a Python process into an armed one: when it imports torch's optimizers, step boundaries are wrapped.

Found through PYTHONPATH by every interpreter of the job. It must be quick (most processes never import torch), must
work in an interpreter where scaletrace is not installed, and must leave no trace of itself on sys.path.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing it from typing is slow, and this runs in every interpreter
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_TARGETS = {"torch.optim.optimizer", "torch.distributed.distributed_c10d"}
_SAID: list[bool] = []  # that this process is not recorded


class _Finder:
    """Stands first on sys.meta_path until both modules of torch are imported, then takes itself away."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _TARGETS:
            return None
        _TARGETS.discard(name)
        if not _TARGETS:
            sys.meta_path.remove(self)
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _install(module)

        loader.exec_module = exec_module
        return spec


def _install(module: Any) -> None:
    """Wrap the step boundary; nothing that fails here may reach the job."""
    try:
        _make_importable()
        from scaletrace.collect.hook.boundary import install

        install(module)
    except Exception as error:
        # the job must run as if we weren't there, but for one line that says why nothing is recorded
        if os.environ.get("SCALETRACE_DEBUG"):
            raise
        if sys.stderr is not None and not _SAID:
            _SAID.append(True)
            sys.stderr.write(f"scaletrace: this process is not recorded: {' '.join(str(error).split())}\n")


def _make_importable() -> None:
    """Where the job's interpreter has no scaletrace, load the one that this file belongs to, without touching sys.path."""
    from importlib.util import find_spec, module_from_spec, spec_from_file_location

    if "scaletrace" in sys.modules or find_spec("scaletrace") is not None:
        return
    root = os.path.dirname(os.path.dirname(_HERE))
    spec = spec_from_file_location("scaletrace", os.path.join(root, "__init__.py"), submodule_search_locations=[root])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["scaletrace"] = module
        spec.loader.exec_module(module)


def _chain() -> None:
    """Run the sitecustomize that this file shadows, as `sitecustomize`; its errors are reported by site, as without us."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [entry for entry in sys.path if entry != _HERE]  # site has made them absolute
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("SCALETRACE_COLLECT"):
    sys.meta_path.insert(0, _Finder())
_chain()
