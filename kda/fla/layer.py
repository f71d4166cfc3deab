"""The layer with FLA's arguments and FLA's way of calling: a mask, and the cache of a Hugging Face model."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from kda.nn import KimiDeltaAttention as Layer
from kda.nn import KimiDeltaCache


class KimiDeltaAttention(Layer):
    """`fla.layers.KimiDeltaAttention` over `kda.nn.KimiDeltaAttention`.

    Args:
        hidden_size, head_dim, num_heads, num_v_heads, lower_bound, allow_neg_eigval, conv_size, norm_eps: as there.
        expand_v: V = expand_v · head_dim.
        layer_idx: place in the cache; a call with `past_key_values` needs it.
        use_short_conv, conv_bias: True and False, the only ones that there are here.
        mode, safe_gate: of FLA's kernels, without effect here.
        others: `backend`, `device` and `dtype`, as in `kda.nn.KimiDeltaAttention`.

    Raises:
        ValueError: as `kda.nn.KimiDeltaAttention`; expand_v makes no whole V; or use_short_conv or conv_bias.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        **others: Any,
    ) -> None:
        V = round(head_dim * expand_v)
        if not math.isclose(V, head_dim * expand_v, rel_tol=1e-5):
            raise ValueError(f"expand_v: expected a whole number of value channels, got {head_dim * expand_v:g}")
        if not use_short_conv or conv_bias:
            raise ValueError(f"expected use_short_conv=True and conv_bias=False, got {use_short_conv} and {conv_bias}")
        super().__init__(
            hidden_size, num_heads, head_dim, num_v_heads, V, conv_size, lower_bound, norm_eps,
            allow_neg_eigval=allow_neg_eigval, gate_rank=V, gate_bias=True, **others,
        )  # fmt: skip
        self.layer_idx = layer_idx

    @classmethod
    def from_fla(cls, layer: nn.Module, backend: str | None = None) -> KimiDeltaAttention:
        """A layer with the sizes and the weights of one of FLA's, or of one of this class, on its device."""
        weights = layer.state_dict()
        heads, values, like = weights["A_log"].numel(), weights["o_norm.weight"].numel(), weights["q_proj.weight"]
        keys = weights["dt_bias"].numel() // heads
        made = cls(
            hidden_size=like.shape[1], expand_v=values / keys, head_dim=keys, num_heads=like.shape[0] // keys,
            num_v_heads=heads, use_short_conv="q_conv1d.weight" in weights, conv_bias="q_conv1d.bias" in weights,
            allow_neg_eigval=getattr(layer, "allow_neg_eigval", False), lower_bound=getattr(layer, "lower_bound", None),
            conv_size=weights["q_conv1d.weight"].shape[-1] if "q_conv1d.weight" in weights else 1,
            layer_idx=getattr(layer, "layer_idx", None), norm_eps=layer.o_norm.eps,  # type: ignore[union-attr, arg-type]
            backend=backend, device=like.device, dtype=like.dtype,
        )  # fmt: skip
        made.load_state_dict(weights)
        return made.train(layer.training)

    def forward(  # type: ignore[override]  # FLA's way of calling
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **others: Any,
    ) -> tuple[Tensor, None, Any]:
        """The output, None where other layers return attentions, and the cache that was given.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            attention_mask: `[B, at least T]`, whose last T columns are 0 for padded rows.
            past_key_values: with `len`, `[layer_idx]` and `update` as FLA's caches have them: it is continued, and with
                `use_cache` it receives the new states.
            others: `cu_seqlens`, which goes before the mask; any other is ignored.

        Raises:
            ValueError: `past_key_values` is given to a layer without `layer_idx`, and as `kda.nn.KimiDeltaAttention`.
        """
        T, cu_seqlens = hidden_states.shape[1], others.get("cu_seqlens")
        mask = attention_mask if cu_seqlens is None else None
        cache = self._read(past_key_values)
        y, cache = super().forward(
            hidden_states, cache, cu_seqlens, bool(use_cache), None if mask is None else mask[:, -T:]
        )
        if past_key_values is not None and cache is not None:
            past_key_values.update(
                recurrent_state=cache.state, conv_state=cache.conv, layer_idx=self.layer_idx, offset=T
            )
        return y, None, past_key_values

    def _read(self, past_key_values: Any) -> KimiDeltaCache | None:
        if past_key_values is None:
            return None
        if self.layer_idx is None:
            raise ValueError("layer_idx: expected a number where past_key_values is given, got None")
        state = past_key_values[self.layer_idx] if len(past_key_values) > self.layer_idx else None
        if state is None or state["recurrent_state"] is None:
            return None
        return KimiDeltaCache(tuple(state["conv_state"]), state["recurrent_state"])
