"""Stand-in for sgl_kernel, of which there are only CUDA builds, so that real SGLang imports on a CPU; for tests only.

Everything can be imported from it and its submodules, and raises when called. `torch.ops.sgl_kernel` stays empty, by
which SGLang tells that it must take its native torch paths.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch

__version__ = "0.0.0+standin"

# They ask for pinned memory whatever the device, which torch refuses without a GPU.
PINNING = {
    "sglang.srt.layers.logits_processor",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.state_capturer.base",
}


def missing(name):
    """A function that says that it is not here. Special names are looked up by Python itself and must fail."""
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not available on this CPU")

    return unavailable


__getattr__ = missing


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any submodule, save the one that SGLang knows how to do without."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("sgl_kernel.") and fullname != "sgl_kernel.scalar_type":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = missing
        return module

    def exec_module(self, module):
        pass


class WithoutPinning(importlib.machinery.SourceFileLoader):
    """Loads a module with every `pin_memory=True` turned off."""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        source = self.get_data(path).replace(b"pin_memory=True", b"pin_memory=False")
        return compile(source, path, "exec", dont_inherit=True)


class WithoutPinningFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of `PINNING`."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in PINNING:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin:
            spec.loader = WithoutPinning(fullname, spec.origin)
        return spec


sys.meta_path.append(Submodules())
if not torch.cuda.is_available():
    sys.meta_path.insert(0, WithoutPinningFinder())
