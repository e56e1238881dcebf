"""The checkpoints of a run: weights, optimizer and counters, written beside the loop and read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from sheepop.checkpoint import RunDirectory, optimizer_state, read_training_state, write_training_state
from sheepop.checkpoint.model_form import ModelForm, WholeModel
from sheepop.checkpoint.run_directory import damaged_model
from sheepop.checkpoint.training_state import TRAINED, read_source_state, read_trained_weights
from sheepop.core.errors import CheckpointError
from sheepop.model import Transformer
from sheepop.tokenizer import Tokenizer
from sheepop.train.counters import TrainingState
from sheepop.train.evaluation_weights import EvaluationWeights
from sheepop.train.optimizers import optimizer_slots
from sheepop.train.source import StepSource


class BackgroundWriter:
    """One thread that runs one job at a time; what a job raises, the next call on this object raises.

    A job must own everything it reads: the loop changes the weights meanwhile.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Waits for the job before, then starts this one."""
        self.wait()
        self._job = self._thread.submit(job)

    def check(self) -> None:
        """Raises what the last job raised, if it has ended by now."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is being written."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """Waits for the last job, whose error is left to `wait`, and ends the thread."""
        self._thread.shutdown()


class Checkpointer:
    """Writes and reads the checkpoints of one run. Writing goes on beside the loop; `check` raises what went wrong.

    `form` says what is stored of the model; without one all of its weights are. The state of `source`, where steps come
    from, is kept with them. Close it at the end.
    """

    def __init__(
        self,
        run: RunDirectory,
        model: Transformer,
        tokenizer: Tokenizer,
        optimizers: Sequence[torch.optim.Optimizer],
        evaluation: EvaluationWeights,
        provenance: Mapping[str, Any],
        form: ModelForm | None = None,
        source: StepSource | None = None,
    ) -> None:
        self.run = run
        self._form = form or WholeModel(model)
        self._model = model
        self._tokenizer = tokenizer
        self._optimizers = optimizers
        self._evaluation = evaluation
        self._provenance = provenance
        self._source = source
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._writer = BackgroundWriter()

    def save(
        self,
        state: TrainingState,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Copies the state as it is now and starts writing it as the checkpoint of `state.step`.

        The model is the one to be used, with the evaluation weights; ``state/`` has the trained ones when they differ.
        Waits for the checkpoint before. `before` runs ahead of the writing and must make durable what the state speaks
        of; `after` runs when the checkpoint is the latest.
        """
        self._writer.wait()
        with self._evaluation.applied():
            weights = _copies(self._form.weights(self._model))
        trained = _copies(self._form.weights(self._model)) if self._evaluation.differ else None
        optimizer = optimizer_state(self._optimizers, self._names)
        optimizer = replace(optimizer, tensors=_copies(optimizer.tensors))
        source = _copies({} if self._source is None else self._source.state())
        provenance = {**self._provenance, "step": state.step, "tokens": state.tokens, "evaluations": list(state.scores)}

        def write() -> None:
            before()
            with self.run.write_checkpoint(state.step) as directory:
                self._form.write(directory, weights, self._tokenizer, provenance)
                write_training_state(directory, optimizer, asdict(state), trained, source)
            after()

        self._writer.submit(write)

    def check(self) -> None:
        """Raises what went wrong in writing, if anything did by now."""
        self._writer.check()

    def wait(self) -> None:
        """Waits until the last checkpoint is written; raises what went wrong."""
        self._writer.wait()

    def close(self) -> None:
        """Waits for what is being written, and ends."""
        self._writer.close()

    def with_best(self, state: TrainingState, warn: Callable[[str], None]) -> TrainingState:
        """Points ``best`` at the best checkpoint that `state`, just loaded, knows of; without it where that is lost."""
        best = state.best_step
        if best is None:
            return state
        problems = [] if best == state.step else damaged_model(self.run.checkpoint(best))
        if not problems:
            if self.run.pointer("best") != best:
                self.run.mark_best(best)
            return state
        what = f"damaged ({'; '.join(problems)})" if best in self.run.steps() else "gone"
        warn(f"The best checkpoint, step {best}, is {what}; the next validation chooses a new one.")
        self.run.forget_best()
        return state.after(best_loss=None, best_step=None)

    def load(self, step: int) -> TrainingState:
        """Restores weights and optimizer from the checkpoint of `step` and returns its counters."""
        directory = self.run.checkpoint(step)
        trained = read_trained_weights(directory, expected=self._evaluation.differ)
        self._form.put(self._model, self._form.read(directory), directory)
        if trained is not None:
            self._evaluation.adopt()
            self._form.put(self._model, trained, directory / "state" / TRAINED)
        if self._source is not None:
            self._source.restore(read_source_state(directory))
        counters = read_training_state(directory, self._optimizers, self._names, optimizer_slots)
        try:
            return TrainingState.from_record(counters)
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{directory / 'state'} does not contain the counters of a run: {error}.") from None


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the CPU's memory, which the loop may not touch any more; from a GPU through pinned memory.

    Checkpoints are float32 throughout, frozen weights that are kept in bfloat16 too.
    """
    copies = {}
    for name, tensor in tensors.items():
        dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
        copy = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
        copies[name] = copy.copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies
