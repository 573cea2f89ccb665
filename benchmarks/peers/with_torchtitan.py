"""The model of torchtitan as it trains on one GPU: fp32 weights under bf16 autocast (or bf16 weights), each block and
the loss compiled, fused AdamW. Its head is not tied to its embedding."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from measure import MAX_GRAD_NORM, Job, new_optimizer, result_of, run_arm, step_rows, time_steps, versions


def arm(job: Job) -> dict[str, Any]:
    import torch
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config.job_config import ActivationCheckpoint, Compile
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.infra.parallelize import apply_compile

    if job["packed_tokens"] is not None:
        raise SystemExit("torchtitan has no arm for packed documents")
    device, compile_config = torch.device(job["device"]), Compile(enable=True)
    # It computes the MLP's width from dim and rounds it up to a multiple of this, which is then the width itself.
    args = TransformerModelArgs(
        dim=job["width"], n_layers=job["depth"], n_heads=job["heads"], n_kv_heads=job["kv_heads"],
        vocab_size=job["vocab_size"], multiple_of=job["mlp_width"], max_seq_len=job["length"],
    )  # fmt: skip
    torch.manual_seed(0)
    with device, torch.no_grad():
        model = Transformer(args)
        model.init_weights()
    assert model.layers["0"].feed_forward.w1.out_features == job["mlp_width"], "another MLP width"
    if job["precision"] == "bf16-pure":
        # Not .to(), which would also cast the complex rotary frequencies.
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    if job["recompute"]:
        apply_ac(model, ActivationCheckpoint(mode="full"), model_compile_enabled=True)
    apply_compile(model, compile_config)
    loss_fn = torch.compile(cross_entropy_loss, backend=compile_config.backend)
    optimizer = new_optimizer(job, model.parameters())

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if job["precision"] == "bf16" else nullcontext()

    def step(batch: tuple[Any, Any]) -> tuple[Any, Any]:
        inputs, labels = batch
        with autocast():
            loss = loss_fn(model(inputs), labels) / labels.numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    batches = []
    for rows in step_rows(job):
        ids = torch.tensor(rows, device=device)
        # As its data loader does: every position has a label.
        labels = torch.cat((ids[:, 1:], ids[:, :1]), dim=1)
        batches.append((ids.numel(), (ids, labels)))
    steps = time_steps(job, batches, step)
    return result_of(job, steps, attention="sdpa", versions=versions("torch", "torchtitan"))


if __name__ == "__main__":
    run_arm(arm)
