"""All that must be saved to go on exactly: the model, the optimizer, the random states, and these few numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from torchstone.errors import CheckpointError


@dataclass
class Progress:
    """How far a run is. `samples` is also the whole state of the sampler.

    `owed` is a step that was made and saved but whose validation a signal cut off; it is caught up on when the run goes
    on, so that the best loss and the metrics are those of a run that was never stopped.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    owed: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        try:
            return cls(**{field.name: values[field.name] for field in fields(cls)})
        except KeyError as error:
            raise CheckpointError(f"state.json has no {error}") from None
