"""Rollouts: the policy answers prompts, the answers are rewarded, and some steps learn from them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sheepop.core.errors import TrainingError
from sheepop.core.random import derive_seed, numpy_generator
from sheepop.data.batch_schedule import SampleOrder
from sheepop.data.batches import IGNORED_LABEL
from sheepop.model import Transformer
from sheepop.posttrain.config import RolloutConfig, SamplingConfig
from sheepop.posttrain.conversations import Question
from sheepop.posttrain.example_store import ExampleSplit
from sheepop.posttrain.policy import (
    ADVANTAGES,
    OLD,
    REFERENCE,
    VALUES,
    AnswerBatch,
    PolicyObjective,
    means_of_answers,
    no_numbers,
    predicted_values,
)  # fmt: skip
from sheepop.posttrain.reward_methods import RewardMethod
from sheepop.posttrain.rewards import Writer, Written
from sheepop.train.objective import Objective
from sheepop.train.placement import Network, Placement
from sheepop.train.source import PreparedStep, StepSource
from sheepop.train.tensor_batch import TensorBatch
from sheepop.train.validation import FinishedNetwork

# The most times that prompts are drawn before a rollout goes on with fewer answers.
_MOST_DRAWS = 4
_ARRAYS = ("input_ids", "labels", "lengths", "document_ids")


@dataclass(eq=False)
class RolloutSource(StepSource):
    """A source of steps from rollouts: ``epochs x minibatches`` steps each, the first of which samples new answers.

    Answers are sampled with the current weights, so no step is prepared ahead. The rollout in use is part of a
    checkpoint.
    """

    prompts: ExampleSplit
    order: SampleOrder
    writer: Writer
    method: RewardMethod
    objective: Objective
    placement: Placement
    reference: Transformer | None
    config: SamplingConfig
    batch_size: int
    micro_batch_size: int
    row_length: int
    answers_per_prompt: int
    seed: int
    pad_id: int
    hashed: bool = False
    ahead: int = 0
    _held: int = -1
    _taken: int = 0
    _batch: AnswerBatch | None = None
    _metrics: dict[str, float] = field(default_factory=dict)
    _rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def steps_per_rollout(self) -> int:
        """The number of steps per rollout."""
        return self.config.epochs * self.config.minibatches

    def prepare(self, number: int) -> PreparedStep:
        """Prepares the minibatch of step `number`, after a new rollout if the step is its first."""
        rollout, place = divmod(number, self.steps_per_rollout)
        if self._held != rollout:
            with self._all_or_nothing():
                self._roll_out(rollout)
        assert self._batch is not None
        chosen = self._minibatch(rollout, place)
        batch = self._batch.rows(chosen) if len(chosen) else self._nothing()
        pieces = [self._batch.rows(piece) for piece in self._pieces(chosen)] or [batch]
        prepared = PreparedStep.of_pieces(
            batch, pieces, self.objective, device=self.placement.device, hashed=self.hashed
        )
        empty = TensorBatch.on_host(self._nothing())
        missing = -len(prepared.micro_batches) % self.placement.layout.num_data
        micro_batches = [*prepared.micro_batches, *[empty] * missing]
        samples = [self._rows[answer] for answer in chosen[: self.config.logged_answers]]
        return replace(prepared, micro_batches=micro_batches, measured=self._metrics, samples=samples)

    def describe(self, number: int) -> list[str]:
        """Returns nothing: answers come from no document."""
        return []

    def state(self) -> dict[str, Tensor]:
        """The current rollout, the position in the order of prompts, and the state of the method."""
        found = {"counters": torch.tensor([self._held, self._taken]), **_named("method", self.method.state())}
        if self._batch is None:
            return found
        arrays = {name: getattr(self._batch, name) for name in _ARRAYS}
        # Without times, which belong to this session: equal runs have equal checkpoints.
        kept = {name: value for name, value in self._metrics.items() if not name.endswith("_seconds")}
        return {
            **found,
            **{name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()},
            "rows": torch.tensor(list(json.dumps(self._rows).encode()), dtype=torch.uint8),
            **_named("numbers", {name: torch.from_numpy(array) for name, array in self._batch.numbers.items()}),
            **_named("metrics", {name: torch.tensor(value, dtype=torch.float64) for name, value in kept.items()}),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores a state, or the initial one if `state` is empty."""
        self._held, self._taken = (int(value) for value in state["counters"]) if state else (-1, 0)
        self.method.restore(_below("method", state))
        self._metrics = {name: float(value) for name, value in _below("metrics", state).items()}
        self._batch = None
        if "input_ids" in state:
            # Runs of older versions have stored no document ids, since every answer was one sequence.
            arrays = {"document_ids": torch.zeros_like(state["labels"]), **state}
            ids, labels, lengths, documents = (arrays[name].numpy() for name in _ARRAYS)
            numbers = {name: tensor.numpy() for name, tensor in _below("numbers", state).items()}
            self._batch = AnswerBatch.of(ids, labels, lengths, numbers, documents)
            self._rows = json.loads(bytes(state["rows"].tolist()))

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Undoes a rollout that a signal or an error interrupts, so that it is repeated with the same prompts."""
        before = self._held, self._taken, self._batch, self._metrics, self._rows
        method = self.method.state()
        try:
            yield
        except BaseException:
            self._held, self._taken, self._batch, self._metrics, self._rows = before
            self.method.restore(method)
            raise

    def _minibatch(self, rollout: int, place: int) -> NDArray[np.int64]:
        """The indices of the answers of one step; each epoch has its own order."""
        assert self._batch is not None
        epoch, part = divmod(place, self.config.minibatches)
        order = numpy_generator(self.seed, "minibatches", rollout, epoch).permutation(len(self._batch.lengths))
        return np.array_split(order, self.config.minibatches)[part]

    def _pieces(self, chosen: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """The answers of each micro-batch of a step; none has more tokens than `micro_batch_size` of longest rows."""
        assert self._batch is not None
        return cut_by_tokens(chosen, self._batch.lengths, self.micro_batch_size * self.row_length)

    def _roll_out(self, rollout: int) -> None:
        """Samples new answers and computes all numbers that the objective reads."""
        started = time.monotonic()
        with self.placement.sampling() as model:
            written, found = self._written(model, rollout)
        self._metrics = {**found, "rollout_seconds": time.monotonic() - started}
        self._batch, self._rows = padded(written, self.pad_id), written.rows()
        self._held = rollout
        if not len(written):
            return
        log_p, values, reference = None, None, None
        policy = self.objective if isinstance(self.objective, PolicyObjective) else None
        if policy is not None and self._reads_log_probabilities(policy):
            log_p, values = self._evaluate(policy, self.placement, self.placement.begin_step, rollout)
        mask = torch.from_numpy(self._batch.labels != IGNORED_LABEL)
        if self.reference is not None:
            assert policy is not None
            with self.placement.gathered():
                reference, _ = self._evaluate(policy, FinishedNetwork(self.reference), lambda: None, rollout)
            found_p = written.log_probabilities(mask) if log_p is None else log_p
            self._metrics["divergence"] = float(torch.where(mask, found_p - reference, 0).sum() / len(written))
        self._check_ceilings()
        numbers = self.method.numbers(written, mask, log_p, reference, values)
        if ADVANTAGES in numbers:
            means = means_of_answers(numbers[ADVANTAGES], mask)[:, 0].tolist()
            self._rows = [{**row, "advantage": mean} for row, mean in zip(self._rows, means, strict=True)]
        if self.steps_per_rollout > 1 and log_p is not None:
            numbers[OLD] = log_p
        if reference is not None:
            numbers[REFERENCE] = reference
        if values is not None:
            numbers[VALUES] = values
        arrays = {name: tensor.float().numpy() for name, tensor in numbers.items()}
        self._batch = replace(self._batch, numbers=arrays)
        self._metrics |= {**self.method.metrics(), "preparation_seconds": time.monotonic() - started}

    def _reads_log_probabilities(self, policy: PolicyObjective) -> bool:
        """Whether something reads the policy's log-probabilities of the answers before the first step.

        A step reads those of its answers itself, so only a second one needs those of the policy that sampled them. The
        sampler's are of temperature 1.
        """
        is_compared = self.reference is not None and policy.temperature != 1.0
        several = self.steps_per_rollout > 1 or policy.vf_coef > 0
        return several or is_compared or self.method.reads_log_probabilities

    def _written(self, model: Transformer, rollout: int) -> tuple[Written, dict[str, float]]:
        """Samples rewarded answers, as many as a rollout needs, and returns them with the means over all samples."""
        wanted = self.batch_size * self.config.minibatches
        kept, everything = Written(), Written()
        for draw in range(_MOST_DRAWS if self.method.draws_again else 1):
            count = -(-(wanted - len(kept)) // self.answers_per_prompt)
            questions = questions_of(self.prompts, self.order.indices(self._taken, count).tolist())
            self._taken += count
            seed = derive_seed(self.seed, "rollout", rollout, draw)
            written = self.writer(model, questions, self.answers_per_prompt, seed)
            everything = everything.and_more(written)
            kept = kept.and_more(written.learnt_from(self.method.advantages(written), wanted - len(kept)))
            if len(kept) == wanted:
                break
        metrics = everything.metrics()
        if len(kept) != len(everything):
            metrics["left_out"] = 1 - len(kept) / len(everything)
        return kept, metrics

    def _nothing(self) -> AnswerBatch:
        """A batch without anything to learn: one token without a label."""
        row = np.full((1, 1), self.pad_id, np.int64)
        return AnswerBatch.of(row, np.full_like(row, IGNORED_LABEL), np.ones(1, np.int64), no_numbers(row.shape))

    @torch.no_grad()
    def _evaluate(
        self, policy: PolicyObjective, network: Network, begin: Callable[[], None], rollout: int
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the log-probabilities (N, T) of all answers, and their values if there is a value model.

        They are computed in the micro-batches of the first epoch and on the same ranks, so that the first ratios are
        exactly 1.
        """
        assert self._batch is not None
        batch = self._batch
        log_p = torch.zeros(batch.labels.shape)
        values = torch.zeros_like(log_p) if policy.vf_coef > 0 and network is self.placement else None
        begin()
        for chosen in self._micro_batches(rollout):
            piece = batch.rows(chosen) if len(chosen) else self._nothing()
            tensors = TensorBatch.from_numpy(piece, self.placement.device).padded(self.placement.layout.parts_of_rows)
            here = slice(len(chosen)), slice(piece.labels.shape[1])
            with self.placement.arithmetic():
                found, hidden = policy.log_probabilities(network, tensors)
                log_p[chosen, here[1]] = found.float().cpu()[here]
                if values is not None:
                    values[chosen, here[1]] = predicted_values(network, tensors, hidden).float().cpu()[here]
        reduce = self.placement.reduce
        return reduce(log_p), None if values is None else reduce(values)

    def _micro_batches(self, rollout: int) -> Iterator[NDArray[np.int64]]:
        """The answers of each micro-batch of this rank; empty ones even out the numbers of the ranks."""
        layout = self.placement.layout
        for place in range(self.config.minibatches):
            cuts = self._pieces(self._minibatch(rollout, place))
            cuts += [np.zeros(0, np.int64)] * (-len(cuts) % layout.num_data)
            yield from (cuts[number] for number in layout.share(len(cuts)))

    def _check_ceilings(self) -> None:
        """Raises `TrainingError` if the policy exceeds a ceiling."""
        config = self.config
        kl_ceiling = config.kl_ceiling if isinstance(config, RolloutConfig) else None
        ceilings = (
            ("kl_ceiling", kl_ceiling, "divergence", "nats from the reference in an answer"),
            ("length_ceiling", config.length_ceiling, "length", "tokens in an answer"),
            ("repetition_ceiling", config.repetition_ceiling, "repetition", "of its four-grams repeated"),
        )
        for key, most, metric, words in ceilings:
            found = self._metrics.get(metric)
            if most is not None and found is not None and found > most:
                raise TrainingError(
                    f"The policy has {found:.3g} {words}, more than {key} = {most:g}, so training stops. "
                    "The run keeps its best checkpoint from before; raise the ceiling to continue."
                )


def cut_by_tokens(chosen: NDArray[np.int64], lengths: NDArray[np.int64], most: int) -> list[NDArray[np.int64]]:
    """The `chosen` rows in pieces of at most `most` tokens, padding included, the longest rows first."""
    rest, pieces = chosen[np.argsort(-lengths[chosen], kind="stable")], []
    while len(rest):
        count = max(1, most // int(lengths[rest[0]]))
        pieces.append(rest[:count])
        rest = rest[count:]
    return pieces


def padded(written: Written, pad_id: int) -> AnswerBatch:
    """The answers as rows, with the tokens that the policy has sampled as labels."""
    lengths = np.array([len(transcript.token_ids) for transcript in written.transcripts], dtype=np.int64)
    shape = (len(written), int(lengths.max(initial=1)))
    ids, labels = np.full(shape, pad_id, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
    documents = np.zeros(shape, np.int64)
    for row, transcript in enumerate(written.transcripts):
        ids[row, : lengths[row]] = transcript.token_ids
        for begin, end in transcript.spans:
            labels[row, begin - 1 : end - 1] = transcript.token_ids[begin:end]
        for start in transcript.starts[1:]:
            documents[row, start:] += 1
    return AnswerBatch.of(ids, labels, lengths, {}, documents)


def questions_of(split: ExampleSplit, numbers: Sequence[int]) -> list[Question]:
    """The prompts of a split with these numbers."""
    return [Question.of(split.example(number).ids.tolist(), split.fields[number]) for number in numbers]


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
