"""Fine-tunes a mid run, or else a base run, on conversations: `python scripts/chat_sft.py --data chats.jsonl`.

Conversations are padded, not packed, so that --device-batch-size applies; `--data.packing true` wastes less.
"""

from torchstone.scripts.nanochat import TrainingScript, run_script

SCRIPT = TrainingScript(
    run_prefix="sft",
    name="chat_sft",
    description="Fine-tune a mid run, or else a base run, on conversations; without --data on the built-in ones.",
    data_defaults={"data.path": "demo:chat"},
    defaults={"data.packing": "false", "optim.learning_rate": "1e-4", "optim.schedule": "linear"},
    previous_prefixes=("mid", "base"),
)

if __name__ == "__main__":
    run_script(SCRIPT)
