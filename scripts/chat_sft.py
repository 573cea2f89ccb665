"""Fine-tunes a mid run, or else a base run, on conversations: `python scripts/chat_sft.py --data chats.jsonl`.

Conversations are padded, not packed, so that --device-batch-size has its meaning; `--data.packing true` wastes less.
"""

from torchstone.stages import Stage, run

STAGE = Stage(
    name="sft",
    script="chat_sft",
    does="Fine-tune on conversations, from a mid run or else a base run; without --data on the built-in ones.",
    without_data={"data.path": "demo:chat"},
    defaults={"data.packing": "false", "optim.learning_rate": "1e-4", "optim.schedule": "linear"},
    follows=("mid", "base"),
)

if __name__ == "__main__":
    run(STAGE)
