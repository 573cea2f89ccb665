"""Transformers as its users train: fp32 weights under bf16 autocast (or bf16 weights), fused AdamW, Liger on a GPU.

Packed documents are padding-free: one row, with position_ids and cu_seq_lens of Transformers' own collator, and
FlashAttention 2. LoRA is PEFT's, on bf16 weights, and its blocks are compiled. On a CPU it is plain eager Transformers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from measure import MAX_GRAD_NORM, Job, new_optimizer, result_of, run_arm, step_rows, time_steps, versions
from new_model import llama_config
from torch_flash import provide_flash_attn


def arm(job: Job) -> dict[str, Any]:
    is_cuda, packed = job["device"] == "cuda", job["packed_tokens"] is not None
    attention = provide_flash_attn(Path(job["folder"])) if is_cuda and packed else "sdpa"
    import torch
    from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, LlamaForCausalLM

    if is_cuda:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        # Its default: rope, norms, SwiGLU, and the fused head and loss.
        apply_liger_kernel_to_llama()
    device = torch.device(job["device"])
    has_adapter = job["lora_rank"] is not None
    is_bf16 = job["precision"] == "bf16-pure" or (has_adapter and job["precision"] == "bf16")
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    implementation = "flash_attention_2" if is_cuda and packed else "sdpa"
    torch.manual_seed(0)
    if job["model"] is not None:
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, attn_implementation=implementation)
    else:
        torch.set_default_dtype(dtype)
        with device:
            model = LlamaForCausalLM._from_config(llama_config(job), attn_implementation=implementation)
        torch.set_default_dtype(torch.float32)
    model.to(device)
    if job["recompute"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if has_adapter:
        model = add_adapter(model, job, is_cuda)
    model.train()
    optimizer = new_optimizer(job, [parameter for parameter in model.parameters() if parameter.requires_grad])

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if job["precision"] == "bf16" else nullcontext()

    def step(batch: dict[str, Any]) -> tuple[Any, Any]:
        with autocast():
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    def to_batch(rows: list[list[int]]) -> dict[str, Any]:
        if packed:
            collate = DataCollatorWithFlattening(return_flash_attn_kwargs=is_cuda, return_tensors="pt")
            batch = collate([{"input_ids": ids, "labels": ids} for ids in rows])
        else:
            batch = {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows)}
        return {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}

    batches = [(sum(map(len, rows)), to_batch(rows)) for rows in step_rows(job)]
    steps = time_steps(job, batches, step)
    return result_of(
        job, steps, attention=attention, versions=versions("torch", "transformers", "liger_kernel", "peft")
    )


def add_adapter(model: Any, job: Job, is_compiled: bool) -> Any:
    from peft import LoraConfig, get_peft_model

    rank = job["lora_rank"]
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    if is_compiled:
        # Compiled as a whole, with Liger's loss in it, it fails with an illegal memory access.
        for block in model.get_base_model().model.layers:
            block.compile()
    return model


if __name__ == "__main__":
    run_arm(arm)
