"""The peers' own code (specforge, speculators), installed or from .peers (`make peers`), beside what is installed here.

Their pins clash with ours, so they come without their needs; what only their servers' clients need is a stub.
"""

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from dflash_train import cli
from dflash_train.util.errors import UserError

PEERS = cli.ROOT / ".peers"


class _OpenAIStub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An `openai` of empty classes: speculators imports its client for servers that are not started here."""

    def find_spec(self, name, path=None, target=None):
        if name == "openai" or name.startswith("openai."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        def attribute(name: str) -> type:
            if name.startswith("__"):  # else whoever walks sys.modules finds a class where it expects a path
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = attribute


@contextmanager
def peers() -> Iterator[None]:
    """.peers behind everything installed, so that only what we lack comes from there. Raises UserError where the peers
    are neither there nor installed."""
    if not PEERS.is_dir() and find_spec("specforge") is None:
        raise UserError(str(PEERS), got="no such folder", want="the peers' own code", fix="make peers")
    stub = _OpenAIStub()
    sys.path.append(str(PEERS))
    sys.meta_path.append(stub)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.meta_path.remove(stub)
        sys.path.remove(str(PEERS))
