"""The checkpoints of a run: weights, optimizer and counters, written in the background and read back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sheepop.checkpoint import RunDirectory
from sheepop.checkpoint.model_form import ModelForm, WholeModel
from sheepop.checkpoint.run_directory import STATE, damaged_model
from sheepop.checkpoint.training_state import (
    OptimizerState,
    optimizer_state,
    read_source_state,
    read_trained_weights,
    read_training_state,
    write_part_of_state,
    write_training_state,
)
from sheepop.checkpoint.weight_files import STEM, Part, write_index, write_part
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, RanksError, StorageError
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Board, Ranks
from sheepop.parallel.sharding import Pieces
from sheepop.tokenizer import Tokenizer
from sheepop.train.counters import TrainingState
from sheepop.train.evaluation_weights import EvaluationWeights
from sheepop.train.optimizers.build import optimizer_slots
from sheepop.train.source import StepSource


class BackgroundWriter:
    """A thread that runs one job at a time; `submit`, `check` and `wait` raise the error of the job before.

    A job must own everything that it reads, because the loop changes the weights meanwhile.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Waits for the previous job, then starts this one."""
        self.wait()
        self._job = self._thread.submit(job)

    def check(self) -> None:
        """Raises the error of the last job if that job has ended with one."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Waits for the job; raises its error."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """Waits for the last job without raising its error, and ends the thread."""
        self._thread.shutdown()


@dataclass(frozen=True)
class Share:
    """The tensors that this rank writes, the writing rank of every tensor, and the bytes of all tensors."""

    tensors: dict[str, Tensor]
    writers: dict[str, int]
    num_bytes: int


class Checkpointer(BackgroundWriter):
    """Writes the checkpoints of one run, in the background, and reads them.

    `form` decides which weights of the model are stored, by default all. A checkpoint also contains the state of
    `source`, which provides the steps. Each of several `ranks` has `pieces` of the tensors, and writes some whole
    tensors into a file of its own, so that any number of ranks can read them. Close it at the end.
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
        ranks: Ranks = ALONE,
        pieces: Pieces | None = None,
    ) -> None:
        super().__init__()
        self.run = run
        self._ranks, self._pieces = ranks, pieces or Pieces({})
        self._part, self._saves = Part(ranks.rank, ranks.size), 0
        self._board: Board | None = None
        self._form = form or WholeModel(model)
        self._model, self._tokenizer, self._source = model, tokenizer, source
        self._optimizers, self._evaluation, self._provenance = optimizers, evaluation, provenance
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}

    def save(
        self,
        state: TrainingState,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Copies the current state and starts writing it as the checkpoint of `state.step`; all ranks call it together.

        The model in the checkpoint has the evaluation weights; ``state/`` has the trained weights if they differ. The
        call first waits for the previous checkpoint. `before` runs ahead of the writing and must put on the disk the
        logs that the state refers to; `after` runs once the checkpoint is the latest. Only the first rank runs them.
        """
        self.wait()
        with self._evaluation.applied():
            weights = self._share(self._form.weights(self._model), divided=self._form.is_divisible)
        trained = self._share(self._form.weights(self._model)).tensors if self._evaluation.differ else None
        optimizer = optimizer_state(self._optimizers, self._names)
        scalars, without = self._of_all_stages(optimizer)
        optimizer = OptimizerState(self._share(optimizer.tensors).tensors, scalars, without)
        source = {} if self._source is None else {name: _copy(each) for name, each in self._source.state().items()}
        _await_copies(self._model.device)
        provenance = {**self._provenance, "step": state.step, "tokens": state.tokens, "evaluations": list(state.scores)}
        self._saves += 1
        board = self._board = self._ranks.board(f"checkpoint-{self._saves}")

        def write() -> None:
            before()
            with self.run.write_checkpoint(state.step) as directory:
                board.tell("place", str(directory.absolute()))
                self._write_model(directory, weights, provenance)
                write_training_state(directory, optimizer, asdict(state), trained, source, self._part)
                board.arrive()
                board.await_all(self._ranks.size)
            after()
            board.tell("done", "")

        def help_first() -> None:
            directory = Path(board.hear("place"))
            if self._form.is_divisible:
                write_part(directory, STEM, weights.tensors, self._part)
            write_part_of_state(directory, optimizer.tensors, trained, self._part)
            board.arrive()
            board.hear("done")

        self.submit(write if self._ranks.is_first else help_first)

    def _share(self, tensors: Mapping[str, Tensor], *, divided: bool = True) -> Share:
        """The whole tensors that this rank writes: an equal share, or everything on the first rank if not `divided`."""
        mine, writers, sizes = {}, {}, [0] * self._ranks.size
        for name, whole in self._pieces.wholes(tensors):
            writers[name] = sizes.index(min(sizes)) if divided else 0
            sizes[writers[name]] += whole.nbytes
            if writers[name] == self._ranks.rank:
                mine[name] = _copy(whole)
        _await_copies(self._model.device)
        return Share(mine, writers, sum(sizes))

    def _of_all_stages(self, optimizer: OptimizerState) -> tuple[dict[str, float], list[str]]:
        """The plain numbers of the optimizers of all stages, and the names of the parameters without state."""
        scalars = {name: value for name, value in optimizer.scalars.items() if self._pieces.is_here(name)}
        without = [name for name in optimizer.without if self._pieces.is_here(name)]
        stages = self._pieces.told((scalars, without))
        of_all = {name: value for numbers, _ in stages for name, value in numbers.items()}
        return of_all, list(dict.fromkeys(name for _, names in stages for name in names))

    def _write_model(self, directory: Path, weights: Share, provenance: Mapping[str, Any]) -> None:
        if not self._ranks.are_several or not self._form.is_divisible:
            self._form.write(directory, weights.tensors, self._tokenizer, provenance)
            return
        write_part(directory, STEM, weights.tensors, self._part)
        count = self._ranks.size
        places = {name: Part(writer, count).file(STEM) for name, writer in weights.writers.items()}
        write_index(directory, places, weights.num_bytes)
        self._form.describe(directory, self._tokenizer, provenance)

    def give_up(self) -> None:
        """Stops waiting for other ranks."""
        if self._board is not None:
            self._board.is_given_up = True

    def resumed(self, console: Console) -> TrainingState | None:
        """Restores the last good checkpoint; None if there is none yet. Raises `CheckpointError` if all are damaged."""
        step = self.run.latest_good(console.warn)
        if step is None:
            if self.run.steps():
                raise CheckpointError(
                    f"No checkpoint in {self.run.checkpoints} is intact, so the run cannot be resumed."
                )
            return None
        state = self.load(step)
        self.run.mark_latest(step)
        state = self.with_best(state, console.warn)
        console.info(f"Resuming from step {step:,} of {self.run.path}.")
        return state

    @contextmanager
    def naming_the_last(self, resume: str) -> Iterator[None]:
        """Adds to an error within the block from which step the command `resume` resumes the run."""
        try:
            yield
        except (StorageError, RanksError) as error:
            step = self.run.pointer("latest")
            if step is None:
                raise type(error)(f"{error} No checkpoint of this run had been written.") from error
            raise type(error)(
                f"{error} Everything up to step {step:,} is saved; resume from there with: {resume}"
            ) from error

    def with_best(self, state: TrainingState, warn: Callable[[str], None]) -> TrainingState:
        """Points ``best`` at the best checkpoint of `state`, just loaded; returns the state, without a best if lost."""
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
        self._put(self._form.read(directory), directory)
        if trained is not None:
            self._evaluation.adopt()
            self._put(trained, directory / STATE)
        if self._source is not None:
            self._source.restore(read_source_state(directory))
        counters = read_training_state(directory, self._optimizers, self._names, optimizer_slots, self._pieces.piece)
        try:
            return TrainingState.from_record(counters)
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{directory / 'state'} does not contain the counters of a run: {error}.") from None

    def _put(self, weights: Mapping[str, Tensor], source: Path) -> None:
        pieces = {name: self._pieces.piece(name, whole) for name, whole in weights.items()}
        self._form.put(self._model, pieces, source)


def _copy(tensor: Tensor) -> Tensor:
    """A copy in the CPU's memory, from a GPU into pinned memory; call `_await_copies` before reading it.

    Checkpoints are float32 throughout, so frozen weights in bfloat16 are converted.
    """
    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    copy = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


def _await_copies(device: torch.device) -> None:
    """Waits for copies from a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
