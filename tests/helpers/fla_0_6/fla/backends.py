"""`fla.backends` of fla-core 0.6: registries of entry points (by function) and of operations (by name)."""

import importlib
import importlib.util
import os
from functools import wraps
from inspect import unwrap


class BaseBackend:
    backend_type = "base"
    package_name = None
    env_var = None
    default_enable = True
    priority = 5
    implementation = None
    verifier = None

    def __init__(self, *, env_var=None):
        if env_var is not None:
            self.env_var = env_var

    def get_implementation(self, function_name):
        return self.implementation or getattr(self, function_name, None)

    @classmethod
    def is_available(cls):
        return cls.package_name is None or importlib.util.find_spec(cls.package_name) is not None

    def is_enabled(self):
        if self.env_var is None or os.environ.get(f"FLA_{self.backend_type.upper()}", "0") != "0":
            return True
        return os.environ.get(self.env_var, "1" if self.default_enable else "0") != "0"

    def verify(self, function_name, *args, **kwargs):
        verifier = self.verifier or getattr(self, f"{function_name}_verifier", None)
        if verifier is None:
            return True, None
        try:
            return verifier(*args, **kwargs)
        except Exception as error:
            return False, str(error)


class BackendRegistry:
    def __init__(self, operation_name):
        self.operation_name = operation_name
        self._backends = {}

    def register(self, backend):
        self._backends[backend.backend_type] = backend

    def dispatch(self, function):
        name = function.__name__

        @wraps(function)
        def wrapper(*args, **kwargs):
            for backend in sorted(self._backends.values(), key=lambda backend: backend.priority):
                if not (backend.is_available() and backend.is_enabled()):
                    continue
                accepted, _ = backend.verify(name, *args, **kwargs)
                implementation = backend.get_implementation(name) if accepted else None
                if implementation is not None:
                    return implementation(*args, **kwargs)
            return function(*args, **kwargs)

        return wrapper


_operations, _functions = {}, {}


def register(entry_point, *, backend=None, verifier=None, env_var=None):
    def decorator(implementation):
        registered = implementation()
        registered.verifier = verifier
        if env_var is not None:
            registered.env_var = env_var
        by_name = isinstance(entry_point, str)
        registry = _operations[entry_point] if by_name else _functions[unwrap(entry_point)]
        registry.register(registered)
        return implementation

    return decorator


def dispatch(entry_point):
    if isinstance(entry_point, str):
        importlib.import_module(f"fla.ops.{entry_point}.backends")
        return _operations.setdefault(entry_point, BackendRegistry(entry_point)).dispatch
    registry = _functions[unwrap(entry_point)] = BackendRegistry(entry_point.__module__)
    return registry.dispatch(entry_point)
