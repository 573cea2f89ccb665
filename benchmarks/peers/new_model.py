"""Writes a Hugging Face folder with random bf16 weights, from which all arms of a fine-tuning job start."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any


def llama_config(job: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=job["vocab_size"], hidden_size=job["width"], intermediate_size=job["mlp_width"],
        num_hidden_layers=job["depth"], num_attention_heads=job["heads"], num_key_value_heads=job["kv_heads"],
        head_dim=job["width"] // job["heads"], max_position_embeddings=max(job["length"], 4096),
        tie_word_embeddings=job["tied"], rope_theta=10000.0, rms_norm_eps=1e-5, use_cache=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip


def main() -> None:
    import torch
    from transformers import LlamaForCausalLM

    job = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(job["device"]):
        model = LlamaForCausalLM(llama_config(job))
    model.save_pretrained(job["model"])
    for file in Path(job["tokenizer"]).iterdir():
        shutil.copy(file, job["model"])


if __name__ == "__main__":
    main()
