"""Continues pretraining from a base run, on text or conversations: `python scripts/mid_train.py --data more.jsonl`.

Unlike fine-tuning, every token is trained, including those of questions. The learning rate starts lower than in
pretraining and decays linearly to zero.
"""

from torchstone.scripts.nanochat import TrainingScript, check_rows_per_device, run_script

SCRIPT = TrainingScript(
    run_prefix="mid",
    name="mid_train",
    description="Continue pretraining from a base run; without --data on the built-in corpus.",
    data_defaults={"data.path": "demo:corpus"},
    defaults={
        "data.train_on": "all",
        "optim.learning_rate": "1e-4",
        "optim.weight_decay": "0.1",
        "optim.schedule": "linear",
    },
    previous_prefixes=("base",),
    check=check_rows_per_device,
)

if __name__ == "__main__":
    run_script(SCRIPT)
