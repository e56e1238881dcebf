"""The policies for a step in trouble: end the run, skip the batch, or go back to an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sheepop.core.console import Console
from sheepop.core.errors import TrainingError, first_few
from sheepop.train.checkpointer import Checkpointer
from sheepop.train.counters import TrainingState
from sheepop.train.trouble import Trouble, TroubleConfig

_NAMED_DOCUMENTS = 20


class Rescued(Protocol):
    """The methods of the loop that a rescue calls."""

    def write_trouble(self, row: dict[str, Any]) -> None:
        """Logs the trouble."""

    def save(self) -> None:
        """Starts saving the state before the step."""

    def go_back(self, step: int) -> TrainingState:
        """Restores weights, optimizer and logs from the checkpoint of `step`."""


class Rescue:
    """Carries out the policy of a run. `describe` returns the names of the documents of a batch."""

    def __init__(
        self,
        config: TroubleConfig,
        checkpointer: Checkpointer,
        console: Console,
        describe: Callable[[int], list[str]],
    ) -> None:
        self._config, self._checkpointer = config, checkpointer
        self._console, self._describe = console, describe

    def meet(self, trouble: Trouble, state: TrainingState, run: Rescued) -> TrainingState:
        """Returns the state to continue from; `state` is that before the step, which is not taken.

        Raises `TrainingError`, after saving, if the policy ends the run.
        """
        documents = self._describe(state.batch_number)
        row = {
            "kind": trouble.kind,
            "policy": trouble.policy,
            "words": trouble.words,
            "at_step": state.step + 1,
            "batch": state.batch_number,
            "documents": documents,
        }
        self._console.warn(
            f"Step {state.step + 1:,}: {trouble.words} ({trouble.kind}). Policy: {trouble.policy}. The batch "
            f"contained {first_few(documents, _NAMED_DOCUMENTS) or 'documents that cannot be named'}."
        )
        if trouble.policy == "skip" and state.skips_in_a_row < self._config.max_skips:
            run.write_trouble(row)
            return state.after(step=state.step + 1, skips_in_a_row=state.skips_in_a_row + 1)
        step = self._step_to_go_back_to(state) if trouble.policy == "rewind" else None
        if step is not None:
            left_out = tuple(sorted({*state.left_out, state.batch_number}))
            found = run.go_back(step).after(left_out=left_out, rewinds=state.rewinds + 1, rewound_to=step)
            run.write_trouble({**row, "back_to": step})  # only now, because going back cuts the logs
            self._console.warn(f"Went back to step {step:,}; this batch is left out from now on.")
            return found
        run.write_trouble(row)
        run.save()
        self._checkpointer.wait()
        raise TrainingError(_final_words(trouble, state))

    def _step_to_go_back_to(self, state: TrainingState) -> int | None:
        """The newest undamaged checkpoint, or an earlier one if the run went back to that before; None to give up."""
        if state.rewinds >= self._config.max_rewinds:
            return None
        self._checkpointer.wait()
        run = self._checkpointer.run
        in_vain = state.rewound_to is not None and run.steps()[-1:] == [state.rewound_to]
        return run.latest_good(self._console.warn, before=state.rewound_to if in_vain else None)


def _final_words(trouble: Trouble, state: TrainingState) -> str:
    tried = {
        "stop": "",
        "skip": f" after {state.skips_in_a_row:,} steps were skipped in a row",
        "rewind": f" after {state.rewinds:,} rewinds, with no checkpoint left to go back to or no more allowed",
    }[trouble.policy]
    key = "non_finite" if trouble.kind == "non-finite" else "spike"
    return (
        f"Step {state.step + 1:,} gave {trouble.words}, and training stopped{tried}. Everything before it is saved. "
        "Lower training.learning_rate or raise training.warmup_steps in a new run, or resume with another "
        f"training.trouble.{key} (skip, rewind)."
    )
