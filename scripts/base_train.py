"""Pretrains a new model: `python scripts/base_train.py --depth 4`."""

from torchstone.scripts.nanochat import TrainingScript, run_script

SCRIPT = TrainingScript(
    run_prefix="base",
    name="base_train",
    description="Pretrain a new model; without --data on the built-in corpus.",
    data_defaults={"data.path": "demo:corpus", "model.tokenizer": "demo:tokenizer"},
    defaults={"optim.schedule": "wsd"},
)

if __name__ == "__main__":
    run_script(SCRIPT)
