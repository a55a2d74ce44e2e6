"""Hugging Face models from tiny configurations, unmodified, with a loss for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCAB = 64
_SPECIAL = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_DECODER = {**_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, **_SPECIAL}


def token_batch(step: int, shape: tuple[int, int] = (2, 9)) -> Tensor:
    """Deterministic token ids without special tokens."""
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(1000 + step))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, **_SPECIAL)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def mistral() -> nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=4, **_DECODER))


def qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(tie_word_embeddings=True, **_DECODER))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, **_DECODER
    )
    return transformers.MixtralForCausalLM(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES, max_position_embeddings=64, vocab_size=VOCAB))


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCAB,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**_SIZES, image_size=16, patch_size=4, num_labels=5)
    )


def whisper() -> nn.Module:
    sizes = {
        f"{side}_{part}": n
        for side in ("encoder", "decoder")
        for part, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    }
    config = transformers.WhisperConfig(
        d_model=32,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=32,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
        **sizes,
        **_SPECIAL,
    )
    return transformers.WhisperForConditionalGeneration(config)


def inputs_of(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Arguments of the model's forward that make it compute a loss, drawn from the token ids."""
    generator = torch.Generator().manual_seed(int(ids.sum()))
    name = getattr(model, "main_input_name", "input_ids")
    if name == "pixel_values":
        return {name: torch.randn(len(ids), 3, 16, 16, generator=generator), "labels": ids[:, 0] % 5}
    if name == "input_features":
        return {name: torch.randn(len(ids), 8, 20, generator=generator), "labels": ids}
    return {"input_ids": ids, "labels": ids}


def hf_loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(**inputs_of(model, ids)).loss
    return loss


def checkpointed(make: Callable[[], nn.Module], *, use_reentrant: bool) -> Callable[[], nn.Module]:
    """The model with gradient checkpointing, switched on as its users do."""

    def make_checkpointed() -> nn.Module:
        model: Any = make()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return model.train()  # type: ignore[no-any-return]

    return make_checkpointed


MODELS: dict[str, Callable[[], nn.Module]] = {
    make.__name__: make for make in (gpt2, llama, mistral, qwen2, mixtral, bert, t5, vit, whisper)
}
# The repeated blocks of each, which are what is gathered together.
BLOCKS = {
    "gpt2": ["transformer.h"],
    "llama": ["model.layers"],
    "mistral": ["model.layers"],
    "qwen2": ["model.layers"],
    "mixtral": ["model.layers"],
    "bert": ["bert.encoder.layer"],
    "t5": ["encoder.block", "decoder.block"],
    "vit": ["vit.layers"],
    "whisper": ["model.encoder.layers", "model.decoder.layers"],
}
