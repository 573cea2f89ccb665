"""Pretrains a new model from its depth: `python scripts/base_train.py --depth 4`."""

from torchstone.stages import Stage, run

STAGE = Stage(
    name="base",
    script="base_train",
    does="Pretrain a new model from its depth; without --data on the built-in corpus.",
    without_data={"data.path": "demo:corpus", "model.tokenizer": "demo:tokenizer"},
    defaults={"optim.schedule": "wsd"},
)

if __name__ == "__main__":
    run(STAGE)
