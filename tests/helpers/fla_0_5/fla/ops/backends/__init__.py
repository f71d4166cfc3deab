"""`fla.ops.backends` of flash-linear-attention 0.5: one registry an operation, made on its first call."""

import contextlib
import importlib
import importlib.util
import os
import typing
from functools import wraps


class BaseBackend:
    backend_type = "base"
    package_name = None
    env_var = None
    default_enable = True
    priority = 5

    @classmethod
    def is_available(cls):
        return cls.package_name is None or importlib.util.find_spec(cls.package_name) is not None

    @classmethod
    def is_enabled(cls):
        return cls.env_var is None or os.environ.get(cls.env_var, "1" if cls.default_enable else "0") != "0"

    @classmethod
    def can_use(cls):
        return cls.is_available() and cls.is_enabled()

    def verify(self, func_name, *args, **kwargs):
        verifier = getattr(self, f"{func_name}_verifier", None)
        if verifier is None:
            return True, None
        try:
            return verifier(*args, **kwargs)
        except Exception as error:
            return False, str(error)


class BackendRegistry:
    _registries: typing.ClassVar = {}
    _initialized: typing.ClassVar = set()

    def __init__(self, operation_name):
        self._backends, self._active = {}, None
        BackendRegistry._registries[operation_name] = self

    def register(self, backend):
        self._backends[backend.backend_type] = backend
        self._active = next((b for b in self._sorted() if b.can_use()), self._active)

    def _sorted(self):
        return sorted(self._backends.values(), key=lambda backend: backend.priority)

    @classmethod
    def ensure_initialized(cls, operation):
        if operation not in cls._initialized:
            with contextlib.suppress(ImportError):
                importlib.import_module(f"fla.ops.{operation}.backends")
            cls._initialized.add(operation)


def dispatch(operation):
    def decorator(function):
        name = function.__name__

        @wraps(function)
        def wrapper(*args, **kwargs):
            BackendRegistry.ensure_initialized(operation)
            for backend in BackendRegistry._registries[operation]._sorted():
                if not (backend.is_available() and backend.is_enabled()):
                    continue
                accepted, _ = backend.verify(name, *args, **kwargs)
                implementation = getattr(backend, name, None) if accepted else None
                if implementation is not None:
                    return implementation(*args, **kwargs)
            return function(*args, **kwargs)

        return wrapper

    return decorator
