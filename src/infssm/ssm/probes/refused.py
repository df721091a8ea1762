"""Layers that carry something through time which is no linear state, with the reason and what to use instead."""

from infssm.ssm.probe import refuse_layer

_CONVOLUTION = (
    "LFM2's short convolution sees three tokens and keeps no state beyond them, so there is nothing for a state "
    "distance to hold; use lwf-f or lwf, which hold features or outputs of any model"
)
_NONLINEAR = (
    "{} updates its state by a nonlinear function of it, so a token has no linear system to compare; use lwf-f or lwf, "
    "which hold features or outputs of any model"
)
for _name in ("lfm2.modeling_lfm2.Lfm2ShortConv", "lfm2_moe.modeling_lfm2_moe.Lfm2MoeShortConv"):
    refuse_layer(f"transformers.models.{_name}", _CONVOLUTION)
for _name in ("*.TTTLinear", "*.TTTMLP", "*.TTTBase"):
    refuse_layer(_name, _NONLINEAR.format("TTT"))
for _name in ("xlstm.*.sLSTMLayer", "xlstm.*.sLSTMCell"):
    refuse_layer(_name, _NONLINEAR.format("sLSTM"))
