"""Turns the start of a Python process into an armed one: when it imports torch's optimizers, step boundaries are wrapped.

Found through PYTHONPATH by every interpreter of the job. It must be quick (most processes never import torch), must
work in an interpreter where scaletrace is not installed, and must leave no trace of itself on sys.path.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_TARGET = "torch.optim.optimizer"


class _Finder:
    """Stands first on sys.meta_path until torch's optimizers are imported, then takes itself away."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            execute(module)
            _install(module)

        spec.loader.exec_module = exec_module
        return spec


def _install(module):  # type: ignore[no-untyped-def]
    """Wrap the step boundary; nothing that fails here may reach the job."""
    try:
        _make_importable()
        from scaletrace.collect.hook.boundary import install

        install(module)
    except Exception:
        # the job must run as if we weren't there; the launcher sees that no rank reported
        if os.environ.get("SCALETRACE_DEBUG"):
            raise


def _make_importable():  # type: ignore[no-untyped-def]
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


def _chain():  # type: ignore[no-untyped-def]
    """Run the sitecustomize that this file shadows, as `sitecustomize`; its errors are reported by site, as without us."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("SCALETRACE_COLLECT"):
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
_chain()
