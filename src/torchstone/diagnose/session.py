"""What the checks of `torchstone diagnose` work on: the run as `torchstone train` builds it, and plain references."""

from __future__ import annotations

from dataclasses import dataclass

from torchstone.training.run import Run


@dataclass
class Diagnosis:
    """`run`: the user's model, data and layout. Checks may leave gradients in it, and nothing else."""

    run: Run
