"""Sequences that a language model generates, token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models.sequence import LanguageModel


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    length: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue every prompt by ``length`` tokens: int64 ``[batch, tokens + length]``, the prompts included.

    A token takes constant time and memory, whatever came before it. Models of transformers (and peft) generate by their
    own ``generate``, without stopping at an end-of-text token.

    Args:
        model: a language model of the package, or one with transformers' ``generate``.
        prompt: ids ``[batch, tokens]``, at least one token each.
        length: tokens to generate.
        temperature: divides the logits; 0 takes the most probable token.
        top_p: sample among the most probable tokens that together have this probability.
        generator: source of the random numbers; torch's own by default.
    """
    if prompt.ndim != 2 or 0 in prompt.shape or prompt.is_floating_point():
        raise ConfigError(f"prompt must be ids [batch, tokens] with at least one token, got {list(prompt.shape)}")
    if length < 1 or temperature < 0 or not 0 < top_p <= 1:
        raise ConfigError(
            f"length={length}, temperature={temperature}, top_p={top_p}: expected at least 1, at least 0, and a share "
            "above 0 up to 1"
        )
    vocabulary_of(model)
    own, training = _own(model), model.training
    model.eval()
    try:
        if own is None:
            return _by_transformers(model, prompt, length, temperature, top_p, generator)
        device = next(own.parameters()).device
        tokens = torch.empty(len(prompt), prompt.shape[1] + length, dtype=torch.long, device=device)
        tokens[:, : prompt.shape[1]] = prompt
        new, state = tokens[:, : prompt.shape[1]], None
        for position in range(prompt.shape[1], tokens.shape[1]):
            logits, state = own(new, state=state, return_state=True)
            new = sample(logits[:, -1], temperature, top_p, generator)[:, None]
            tokens[:, position : position + 1] = new
        return tokens
    finally:
        model.train(training)


def vocabulary_of(model: nn.Module) -> int:
    """How many tokens a language model knows; ConfigError for a model that cannot generate."""
    if (own := _own(model)) is not None:
        return own.num_classes
    if not callable(getattr(model, "generate", None)):
        raise ConfigError(
            f"{type(model).__name__} cannot generate: it is neither a language model of infssm nor has it "
            "transformers' generate method"
        )
    config: Any = model.config
    return int(config.vocab_size)


def _own(model: nn.Module) -> LanguageModel | None:
    """The package's language model, if the model is one or wraps one (peft)."""
    return next((module for module in model.modules() if isinstance(module, LanguageModel)), None)


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> Tensor:
    """One token for each row of ``logits: [batch, vocabulary]``: int64 ``[batch]``; see :func:`generate`."""
    if temperature == 0:
        return logits.argmax(-1)
    shares = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p < 1:
        ranked, order = shares.sort(dim=-1, descending=True)
        # A token stays if those before it have less than top_p together: the most probable one always does.
        ranked[ranked.cumsum(-1) - ranked >= top_p] = 0
        shares = torch.zeros_like(shares).scatter_(-1, order, ranked)
    # By the inverse of the distribution function: one random number for each row, where torch.multinomial draws one for
    # each token of the vocabulary and takes 15 times as long. Double precision, which MPS lacks, keeps rounding from
    # selecting a token of probability 0.
    ends = shares.cumsum(-1, dtype=torch.float32 if shares.device.type == "mps" else torch.float64)
    source = ends.device if generator is None else generator.device
    place = torch.rand(len(ends), 1, dtype=ends.dtype, generator=generator, device=source)
    drawn = torch.searchsorted(ends, place.to(ends.device) * ends[:, -1:], right=True)
    return drawn[:, 0].clamp(max=ends.shape[1] - 1)


def _by_transformers(
    model: Any,
    prompt: Tensor,
    length: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator | None,
) -> Tensor:
    ids = prompt.to(next(model.parameters()).device)
    options: dict[str, Any] = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": temperature > 0}
    options["use_cache"] = True  # an old model's configuration says otherwise, as its forwards need none
    if temperature > 0:
        options |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
    if model.generation_config.pad_token_id is None:
        options["pad_token_id"] = 0  # nothing is padded, but transformers would warn
    # transformers draws only from torch's global generator, so that is seeded for the call and put back after it.
    devices = [ids.device] if ids.is_cuda else []
    with torch.random.fork_rng(devices, enabled=generator is not None):
        if generator is not None:
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator, device=generator.device)))
        generated: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return generated
