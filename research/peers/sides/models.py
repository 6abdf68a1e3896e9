"""
SmolLM2-135M in the forms that the sides read: a folder of transformers (f32 safetensors), and GGUF in f16 and Q8_0 for llama.cpp, all with the
same weights. They are those of the GGUF that scripts/fetch-assets has fetched, or, where it is not there, random ones by a fixed seed.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 20_260_101


def random_model() -> LlamaForCausalLM:
    """The shape of SmolLM2-135M."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def widened(source: Path) -> LlamaForCausalLM:
    """A GGUF's weights in f32."""
    read = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # what was read from GGUF remembers that and refuses to be saved
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(source.parent, gguf_file=source.name))
    model.load_state_dict(read.state_dict())
    return model


def halves_to_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """
    Rows of a projection to queries or keys, as llama.cpp wants them: it rotates entries 2i and 2i + 1 of a head together, transformers i and
    i + half.
    """
    outputs, inputs = weight.shape
    return weight.reshape(heads, 2, outputs // heads // 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def write_gguf(model: Any, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """All matrices of this type, norms in f32; without a tokenizer, as ids go in."""
    config, weights = model.config, {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)

    def put(name: str, weight: np.ndarray) -> None:
        as_stored = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else kind
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, as_stored), raw_dtype=as_stored)

    put("token_embd", weights["model.embed_tokens.weight"])
    put("output_norm", weights["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        of = f"model.layers.{layer}"
        put(f"blk.{layer}.attn_norm", weights[f"{of}.input_layernorm.weight"])
        put(f"blk.{layer}.ffn_norm", weights[f"{of}.post_attention_layernorm.weight"])
        for there, here, heads in (
            ("attn_q", "self_attn.q_proj", config.num_attention_heads),
            ("attn_k", "self_attn.k_proj", config.num_key_value_heads),
            ("attn_v", "self_attn.v_proj", None),
            ("attn_output", "self_attn.o_proj", None),
            ("ffn_gate", "mlp.gate_proj", None),
            ("ffn_up", "mlp.up_proj", None),
            ("ffn_down", "mlp.down_proj", None),
        ):
            weight = weights[f"{of}.{here}.weight"]
            put(f"blk.{layer}.{there}", halves_to_pairs(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    spec = json.loads(sys.argv[1])
    folder = Path(spec["folder"])
    made = folder.with_suffix(".part")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    if spec["gguf"]:
        model = widened(Path(spec["gguf"]))
    else:
        model = random_model()
    model.save_pretrained(made)
    write_gguf(model, made / "f16.gguf", gguf.GGMLQuantizationType.F16)
    write_gguf(model, made / "q8_0.gguf", gguf.GGMLQuantizationType.Q8_0)
    made.rename(folder)
    print(json.dumps({"parameters": model.num_parameters()}))


if __name__ == "__main__":
    main()
