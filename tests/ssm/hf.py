"""Tiny random transformers models, one per family, and the arguments their own slow path gives its scan."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from infssm._torchvision import torchvision

WIDTH, TOKENS, VOCAB = 16, 7, 32
_BASE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "pad_token_id": 0}
_ATTENTION: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
_SSM2: dict[str, Any] = {
    "mamba_d_state": 4, "mamba_d_conv": 3, "mamba_expand": 2, "mamba_n_heads": 4, "mamba_d_head": 8,
    "mamba_n_groups": 2, "mamba_chunk_size": 4,
}  # fmt: skip

# family: (model type, class prefix, options)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mamba": ("mamba", "Mamba", {"state_size": 4, "time_step_rank": 3, "conv_kernel": 3}),
    "mamba-biased": (
        "mamba", "Mamba", {"state_size": 4, "use_bias": True, "use_conv_bias": False, "hidden_act": "gelu"},
    ),
    "falcon-mamba": ("falcon_mamba", "FalconMamba", {"state_size": 4, "time_step_rank": 3}),
    "jamba": (
        "jamba", "Jamba",
        _ATTENTION | {
            "mamba_d_state": 4, "mamba_dt_rank": 3, "attn_layer_period": 2, "attn_layer_offset": 0,
            "num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 3,
        },
    ),
    "mamba2": (
        "mamba2", "Mamba2",
        {
            "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4,
            "time_step_limit": (0.02, 0.06),
        },
    ),
    "mamba2-one-group": (
        "mamba2", "Mamba2",
        {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4, "use_bias": True},
    ),
    "bamba": ("bamba", "Bamba", _ATTENTION | _SSM2 | {"attn_layer_indices": [0]}),
    "granite-moe-hybrid": (
        "granitemoehybrid", "GraniteMoeHybrid",
        _ATTENTION | _SSM2 | {
            "layer_types": ["attention", "mamba"], "num_local_experts": 2, "num_experts_per_tok": 1,
            "shared_intermediate_size": 24,
        },
    ),
    "falcon-h1": (
        "falcon_h1", "FalconH1",
        _ATTENTION | _SSM2 | {
            "mamba_d_ssm": 32, "head_dim": 8, "ssm_in_multiplier": 1.7, "ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 0.9],
        },
    ),
    "zamba2": (
        "zamba2", "Zamba2",
        {
            "mamba_d_state": 4, "mamba_d_conv": 3, "mamba_expand": 2, "mamba_ngroups": 2, "n_mamba_heads": 4,
            "mamba_headdim": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 24,
            "num_mem_blocks": 1, "adapter_rank": 2, "hybrid_layer_ids": [1], "chunk_size": 4, "time_step_min": 0.9,
            "layers_block_type": ["mamba", "hybrid"],
        },
    ),
    "nemotron-h": (
        "nemotron_h", "NemotronH",
        {
            "ssm_state_size": 4, "conv_kernel": 3, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2,
            "chunk_size": 4,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24,
            "layers_block_type": ["mamba", "attention", "mamba"], "num_hidden_layers": 3,
        },
    ),
    "zamba": (
        "zamba", "Zamba",
        {
            "mamba_d_state": 4, "mamba_dt_rank": 3, "n_mamba_heads": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 24, "layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3,
        },
    ),
}  # fmt: skip


def make(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random ForCausalLM of the family; every parameter is given noise so that no bias or norm is trivial."""
    model_type, prefix, options = FAMILIES[family]
    torchvision()  # transformers imports it, and the two wheels may not fit together
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{prefix}Config")(**{**_BASE, **options, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    assert type(model).__module__ == f"transformers.models.{model_type}.modeling_{model_type}"
    return model


def tokens(*, seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randint(1, VOCAB, (batch, TOKENS), generator=torch.Generator().manual_seed(seed))


@contextmanager
def captured_scans(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Tensor]]]:
    """What the model's own slow path gives each scan: delta after bias, softplus and clamp, A, B, C, token-major."""
    module = importlib.import_module(type(model).__module__)
    calls: list[dict[str, Tensor]] = []
    name = "mamba2_chunk_scan" if hasattr(module, "mamba2_chunk_scan") else "mamba_selective_scan"
    original = getattr(module, name)

    def scan1(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **kwargs: Any) -> Any:
        delta = torch.log1p(torch.exp(dt + kwargs["delta_bias"][:, None])).transpose(1, 2)
        calls.append({"delta": delta, "A": A, "B": B.transpose(1, 2), "C": C.transpose(1, 2)})
        return original(u, dt, A, B, C, **kwargs)

    def scan2(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **kwargs: Any) -> Any:
        low, high = kwargs["dt_limit"]
        delta = torch.log1p(torch.exp(dt + kwargs["dt_bias"])).clamp(low, high)
        calls.append({"delta": delta, "A": A[:, None], "B": B, "C": C})
        return original(u, dt, A, B, C, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, scan2 if name == "mamba2_chunk_scan" else scan1)
        yield calls
