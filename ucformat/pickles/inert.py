"""Inert stand-ins for whatever a pickle names, and the list of names that no honest checkpoint has.

A pickle names classes and functions and says how to call them. Here a name becomes a class of our own that records
the call. Nothing is imported, nothing is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

_NONE: Mapping[str, object] = MappingProxyType({})  # millions of stand-ins share it: most calls have no keywords


class InertType(type):
    """Type of the stand-in classes. Sealed, so that a pickle cannot change one for the next reader."""

    class_name: str
    owner_name: str
    member: str

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError("stand-ins can't be changed")


class Inert(metaclass=InertType):
    """An object of an unknown class (or the result of an unknown call), as the pickle describes it.

    `args`/`kwargs` of the call, `state` as given to BUILD, `entries` appended, `items` set.
    """

    __slots__ = ("args", "entries", "items", "kwargs", "state")
    class_name: ClassVar[str] = ""
    owner_name: ClassVar[str] = ""
    """Of what a class holds: the class."""
    member: ClassVar[str] = ""
    """And its name there."""
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    state: object
    entries: Sequence[object]
    items: Sequence[tuple[object, object]]

    def __new__(cls, *args: object, **kwargs: object) -> Inert:
        self = object.__new__(cls)
        self.args, self.kwargs, self.state, self.entries, self.items = args, kwargs or _NONE, None, (), ()
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Everything is recorded by `__new__`, which NEWOBJ calls alone."""

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        if not isinstance(self.items, list):
            self.items = []
        self.items.append((key, value))

    def append(self, entry: object) -> None:
        self.extend((entry,))

    def extend(self, entries: Iterable[object]) -> None:
        if not isinstance(self.entries, list):
            self.entries = []
        self.entries.extend(entries)

    add = append

    def __repr__(self) -> str:
        return f"<inert {self.class_name}>"

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that the pickle sets, when `state` is a dict or a (dict, slots) pair; else empty."""
        parts = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        merged: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, dict):
                merged.update(part)
        return merged


@lru_cache(maxsize=4096)
def inert_member(owner: InertType, name: str) -> InertType:
    """The stand-in for `owner.name`: a class inside a class that can be called, a member of an enum, or a class's method."""
    held = {"__slots__": (), "class_name": f"{owner.class_name}.{name}", "owner_name": owner.class_name, "member": name}
    return InertType("Inert", (Inert,), held)


@lru_cache(maxsize=4096)  # types are slow to make, and a hostile file must not fill memory with them
def inert_class(class_name: str) -> InertType:
    """The stand-in class for `class_name` ("module.Class")."""
    return InertType("Inert", (Inert,), {"__slots__": (), "class_name": class_name})


_HOSTILE_MODULES = frozenset(
    {
        "os", "posix", "nt", "posixpath", "ntpath", "subprocess", "_posixsubprocess", "sys", "_sys", "runpy", "importlib",
        "imp", "_imp", "pkgutil", "zipimport", "socket", "_socket", "socketserver", "ssl", "shutil", "pty", "tty", "fcntl",
        "resource", "signal", "_signal", "pickle", "_pickle", "cPickle", "marshal", "shelve", "ctypes", "_ctypes", "cffi",
        "code", "codeop", "commands", "popen2", "webbrowser", "multiprocessing", "_multiprocessing", "threading", "_thread",
        "concurrent", "asyncio", "pdb", "bdb", "timeit", "profile", "cProfile", "trace", "pydoc", "doctest", "gc", "atexit",
        "site", "venv", "ensurepip", "tempfile", "glob", "fileinput", "linecache", "inspect",
        "requests", "urllib", "urllib2", "urllib3", "http", "httplib", "httpx", "aiohttp", "ftplib", "smtplib", "poplib",
        "imaplib", "telnetlib", "xmlrpc", "platform", "pip", "setuptools", "distutils", "pkg_resources", "sqlite3",
        "antigravity", "this", "idlelib", "lib2to3", "unittest", "_pytest", "pytest", "nose", "fabric", "paramiko",
        "cloudpickle", "joblib", "thread", "SocketServer", "BaseHTTPServer", "SimpleHTTPServer", "xmlrpclib",
    }
)  # fmt: skip
_HOSTILE_PREFIXES = (
    "torch.hub", "torch.jit", "torch.package", "torch.utils.cpp_extension", "torch.utils.bottleneck", "torch.utils.collect_env",
    "torch.utils.data.datapipes", "torch.utils.model_zoo", "torch.utils._config_module", "torch._inductor", "torch._dynamo",
    "torch.multiprocessing", "torch.distributed.rpc", "torch.distributed.run", "torch.distributed.launch",
    "torch.distributed.elastic", "numpy.testing", "numpy.f2py", "numpy.distutils", "numpy.lib.npyio", "numpy.ctypeslib",
)  # fmt: skip
_HOSTILE_NAMES = frozenset(
    {
        "builtins.eval", "builtins.exec", "builtins.compile", "builtins.open", "builtins.__import__", "builtins.setattr",
        "builtins.delattr", "builtins.globals", "builtins.locals", "builtins.vars", "builtins.input",
        "builtins.raw_input", "builtins.breakpoint", "builtins.reduce", "builtins.apply",
        "builtins.execfile", "builtins.file", "builtins.reload", "builtins.exit", "builtins.quit", "builtins.help",
        "functools.reduce",
        "torch.load", "torch.save", "torch.compile", "torch.from_file", "torch.serialization.load",
        "torch.serialization._load", "torch.serialization._legacy_load", "torch.ops", "torch.classes",
        "torch.utils.import_utils", "numpy.load", "numpy.save", "numpy.fromfile", "numpy.memmap", "numpy.loadtxt",
        "numpy.genfromtxt", "numpy.core.memmap", "numpy._core.memmap", "numpy.core.multiarray.fromfile",
        "numpy._core.multiarray.fromfile", "numpy.lib.format.read_array", "pandas.read_pickle", "pandas.eval",
        "pandas.io.pickle.read_pickle", "types.CodeType", "types.FunctionType", "copyreg.add_extension", "copyreg.pickle",
        "codecs.open", "logging.config.listen", "logging.FileHandler", "io.open", "io.open_code", "io.FileIO", "_io.open",
        "_io.open_code", "_io.FileIO", "pathlib.Path.unlink", "dill.load", "dill.loads", "dill._dill.loads",
        "dill._dill._import_module", "dill._dill._create_function", "dill._dill._create_code", "dill._dill._eval_repr",
        "dill._dill._get_attr",
    }
)  # fmt: skip


def is_hostile(module: str, name: str) -> bool:
    """Whether `module.name` could run code, open files or reach the network if it were called."""
    full = f"{module}.{name}"
    return (
        module.split(".", 1)[0] in _HOSTILE_MODULES
        or ("." in name and not _HOSTILE_MODULES.isdisjoint(name.split(".")))
        or any(full == prefix or full.startswith(prefix + ".") for prefix in _HOSTILE_PREFIXES)
        or full in _HOSTILE_NAMES
    )
