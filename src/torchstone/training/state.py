"""The counters of a run. With the model, the optimizer and the RNG states, they are all that resuming needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torchstone.errors import CheckpointError

REQUIRED = ("step", "samples", "tokens", "loss_tokens", "best_loss", "best_step", "pending_metrics")


@dataclass
class Progress:
    """How far a run has progressed. `samples` is also the complete state of the sampler.

    `pending_metrics` are the metrics of the last step if a signal interrupted its validation. The resumed run repeats
    the validation and writes them, so that its metrics and best loss match an uninterrupted run.

    `micro_batch_limit`: the most tokens of a micro-batch, padding included, since a larger one ran out of memory
    (training/out_of_memory.py). `oom_splits`: how often that happened.

    Of steps with bad numbers (training/bad_steps.py): how often a batch was skipped, the run rolled back, a loss was a
    spike; how many batches were skipped in a row; the samples and tokens that were drawn and left out; and the last
    losses, which decide what a spike is.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    pending_metrics: dict[str, Any] | None = None
    # Validations since the best one.
    stale_validations: int = 0
    micro_batch_limit: int | None = None
    oom_splits: int = 0
    skipped_steps: int = 0
    rollbacks: int = 0
    loss_spikes: int = 0
    bad_in_a_row: int = 0
    skipped_samples: int = 0
    skipped_tokens: int = 0
    recent_losses: list[float] = field(default_factory=list)

    @property
    def trained_samples(self) -> int:
        return self.samples - self.skipped_samples

    @property
    def last_logged_step(self) -> int:
        """The last step with a line in metrics.jsonl."""
        return self.step - (self.pending_metrics is not None)

    def count_validation(self, loss: float) -> None:
        """Updates the best loss after the validation of the current step."""
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.best_step, self.stale_validations = loss, self.step, 0
        else:
            self.stale_validations += 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        if "owed" in values:
            # The name of this key in older checkpoints.
            values = values | {"pending_metrics": (values["owed"] or {}).get("values")}
        missing = [key for key in REQUIRED if key not in values]
        if missing:
            raise CheckpointError(f"state.json has no {missing[0]!r}")
        # Older checkpoints do not have the others.
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})
