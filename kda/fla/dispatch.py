"""Our place in FLA's own dispatch: callers of `fla.ops.kda` then run our kernels and change nothing.

FLA asks its backends in turn whether they take a call, ours first. Where ours does not, FLA goes on as if it were not
there; the reason is logged once, as a warning of the logger `kda.fla`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from kda import backends
from kda.backends import environment
from kda.checks import checked
from kda.fla.gate import fused_kda_gate
from kda.fla.operators import chunk_kda, fused_recurrent_kda_fwd

logger = logging.getLogger("kda.fla")
_logged: set[str] = set()


def register() -> None:
    """Let FLA's dispatch of its KDA operators ask us first. A second call changes nothing.

    The environment's FLA_KDA_OPS=0 makes FLA pass us over, as other such variables do for FLA's own backends.

    Raises:
        ImportError: flash-linear-attention is not installed, or it is older than 0.5, which has no such dispatch.
    """
    try:
        from fla import backends as dispatch  # fla-core 0.6: entry points and operations have registries of their own
    except ImportError:
        from fla.ops.backends import BackendRegistry, BaseBackend  # 0.5

        BackendRegistry.ensure_initialized("kda")
        BackendRegistry._registries["kda"].register(_backend(BaseBackend)())
        return
    from fla.ops.kda.chunk import chunk_kda as entry_point

    adapter = _backend(dispatch.BaseBackend)
    dispatch.register(entry_point)(adapter)
    dispatch.register("kda")(adapter)


def _backend(base: type) -> type:
    """The class that FLA asks: `<function>_verifier` returns (taken, reason), `<function>` runs the call."""

    class KdaOps(base):
        backend_type = "kda_ops"
        package_name = "kda"
        env_var = "FLA_KDA_OPS"
        default_enable = True
        priority = -1  # before FLA's own, which are 0 and more

    for name, operator, refusal in (
        ("chunk_kda", chunk_kda, _refusal),
        ("fused_recurrent_kda_fwd", fused_recurrent_kda_fwd, _refusal),
        ("fused_kda_gate", fused_kda_gate, _refusal_of_gate),
    ):
        setattr(KdaOps, name, staticmethod(operator))
        setattr(KdaOps, f"{name}_verifier", staticmethod(_verifier(name, operator, refusal)))
    return KdaOps


def _verifier(
    name: str, operator: Callable[..., Any], refusal: Callable[..., str | None]
) -> Callable[..., tuple[bool, str | None]]:
    def verify(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        try:
            reason = refusal(operator, *args, **kwargs)
        except (NotImplementedError, TypeError, ValueError) as error:
            reason = str(error)
        if reason is not None and (message := f"{name} runs FLA's own kernels: {reason}") not in _logged:
            _logged.add(message)
            logger.warning(message)
        return reason is None, reason

    return verify


def _refusal(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """Why no kernel of ours takes the call; that `auto` would run it on torch is slower than FLA's kernels."""
    translated = inspect.unwrap(operator)(*args, **kwargs)
    call = checked(translated.op, **translated.values)
    name = environment.backend_name()
    if name == "auto":
        name = backends.for_device(call.q.device.type)
    return "; ".join(f"{name}: {reason}" for reason in backends.refusals(name, call)) or None


def _refusal_of_gate(_: Callable[..., Any], g: Any, *args: Any, **kwargs: Any) -> str | None:
    """The gate alone has no kernel: where FLA's runs, it is the faster one."""
    has_kernels = backends.for_device(g.device.type) != "torch"
    return f"kda-ops has no kernel for the gate alone on {g.device.type}" if has_kernels else None
