"""Goes on pretraining from a base run, on text or conversations: `python scripts/mid_train.py --data more.jsonl`.

Every token is trained on, those of questions too, which is what tells it from fine-tuning; the learning rate starts
lower than that of pretraining and falls to zero in a straight line.
"""

from torchstone.stages import Stage, more_rows_than_before, run

STAGE = Stage(
    name="mid",
    script="mid_train",
    does="Go on pretraining from a base run; without --data on the built-in corpus.",
    without_data={"data.path": "demo:corpus"},
    defaults={"data.train_on": "all", "optim.learning_rate": "1e-4", "optim.schedule": "linear"},
    follows=("base",),
    remark=more_rows_than_before,
)

if __name__ == "__main__":
    run(STAGE)
