"""Trains a family of small runs, fits a law to them, and says which run is best for a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sheepop.core.budget import Budget
from sheepop.core.config import dump_tree, merge, validate
from sheepop.core.console import Console
from sheepop.core.errors import DataError, OutputError, SheepOpError, UsageError
from sheepop.core.files import remove_tree, write_atomic, write_json
from sheepop.core.interrupts import interrupts_advise
from sheepop.core.locks import exclusive_lock
from sheepop.core.machine import usable_cores
from sheepop.core.program import typed
from sheepop.data import Corpus, is_corpus
from sheepop.jobs.config import SheepOpConfig, read_settings
from sheepop.jobs.data import build
from sheepop.jobs.family_runs import (
    RUNS,
    failure_of,
    is_done,
    place_of,
    score_of,
    settings_of,
    side_by_side,
    train_member,
)
from sheepop.jobs.recipe import (
    ARCHITECTURE,
    MOST_PASSES_OF_NGRAMS,
    choose_size,
    choose_tokenizer,
    own_parts,
    text_bytes,
)
from sheepop.jobs.recipe_sizes import Size
from sheepop.jobs.run.listing import read_run
from sheepop.model import ModelConfig
from sheepop.report import number
from sheepop.scale.allocation import Cost, Use, best_size
from sheepop.scale.family import Beside, Family, Member, plan_family
from sheepop.scale.fit import Fit, KnownBest, Observation, fit_law
from sheepop.scale.law import REPETITIONS, recipe_law
from sheepop.scale.page import LAW, RUN, Recommended, Scaled, write_page
from sheepop.scale.shapes import Shape, shape_for
from sheepop.train import TrainingConfig

_ROW_TOKENS, _ROWS = 128, 16  # as the recipe has them for small models
_CORPUS = "corpus"
_LOCK = ".lock"
_OWN = (_CORPUS, f".{_CORPUS}", _LOCK)  # of a family whose corpus was not finished
_SPENT = 0.25  # of the budget, for the family
_MEASURED_SECONDS = 1.0
_LARGEST_VOCABULARY = 2048  # more entries take most of the operations of small networks
# The rows of a step grow with the operations as in the recipe.
_MORE_ROWS = ((1e16, 64), (1e15, 32))
_FAR = 100.0  # times the operations of the largest run


@dataclass(frozen=True)
class ScaleRequest:
    """What to find out: the best run for `budget` on the text at `paths`; the family may cost `spend`.

    `sizes` are those of the family, by default chosen around the best ones that the recipe's law gives. `overrides`
    are ``key=value`` settings of all runs. As many runs as `at_once` says train side by side, by default one on each
    core of a CPU. `repetitions` and `inference` are those of `sheepop.scale.allocation.Use`.
    """

    paths: Sequence[Path]
    budget: Budget
    output: Path
    spend: Budget | None = None
    sizes: Sequence[Shape] = ()
    overrides: Sequence[str] = ()
    at_once: int | None = None
    repetitions: float = REPETITIONS
    inference: float = 0.0
    seed: int = 0


def scale(request: ScaleRequest, console: Console) -> Scaled:
    """Plans and trains a family, fits the law, and writes page, picture, numbers and ``run.yaml``.

    Raises `OutputError` for a directory that is not empty, and `UsageError` for a budget that is too small.
    """
    if "usd" in (request.budget.kind, request.spend and request.spend.kind):
        raise UsageError("A family has no price. Give --budget and --spend as times or operations: 1h, 1e15flops.")
    if request.output.exists() and any(not each.name.startswith(_OWN) for each in request.output.iterdir()):
        raise OutputError(
            f"{request.output} is not empty. Go on with its family (--resume), or choose another --output."
        )
    with _at_work(request.output):
        _begin(request, console)
        return _trained(request.output, console, request.at_once)


def resume(directory: Path, console: Console, *, at_once: int | None = None) -> Scaled:
    """Trains what is left of a family; finished runs are kept, and one that was interrupted continues.

    Raises `DataError` for a directory without a family, and `UsageError` while another process works on it.
    """
    Family.read(directory)
    with _at_work(directory):
        return _trained(directory, console, at_once)


def _trained(directory: Path, console: Console, at_once: int | None) -> Scaled:
    family = Family.read(directory)
    left = [member for member in family.members if not is_done(directory, member)]
    device = str(family.settings.get("device", "auto"))
    count = at_once or (1 if device not in ("auto", "cpu") else max(1, int(usable_cores())))
    with console.progress("Family", len(family.members), "runs", done=len(family.members) - len(left)) as progress:
        if count == 1:
            for member in left:
                train_member(directory, member.name)
                progress.advance()
        else:
            for _ in side_by_side(directory, left, count):
                progress.advance()
    return fitted(directory, console)


def fitted(directory: Path, console: Console) -> Scaled:
    """Fits the law to the finished runs of a family, and writes what follows from it."""
    family = Family.read(directory)
    fit, runs, left_out, bits = _fit(directory, family, console)
    budget = family.budget.amount
    wanted, _ = best_size(fit.law, budget, family.cost, family.use)
    low, high = fit.interval(lambda law: best_size(law, budget, family.cost, family.use)[0])
    shape, of_recipe = shape_for(wanted, family.vocab_size), _weights(family, family.recipe)
    recipes = of_recipe, family.use.worth(family.use.tokens(budget, family.cost, of_recipe))
    parameters = _weights(family, shape)
    tokens = family.use.tokens(budget, family.cost, parameters)
    if tokens <= 0:
        raise DataError(
            f"The budget of {family.budget.words} pays for no training of the best size, {shape}. Raise it."
        )
    flops = 6 * parameters * tokens
    worth = family.use.worth(tokens)
    recommended = Recommended(
        shape, parameters, (low, high), tokens, flops,
        max(
            int(family.settings["training"]["global_batch_size"]),
            next((rows for least, rows in _MORE_ROWS if flops >= least), 1),
        ),
        family.learning_rate(shape), fit.predict(parameters, worth), sum(bits) / len(bits),
        flops > _FAR * max(run.flops for run in runs),
        family.recipe, fit.law.loss(*recipes), fit.compare((parameters, worth), recipes),
    )  # fmt: skip
    scaled = Scaled(family, tuple(runs), left_out, fit, recommended)
    write_atomic(directory / RUN, dump_tree(_run_settings(family, recommended)))
    write_json(directory / LAW, scaled.to_dict())
    write_page(directory, scaled)
    return scaled


def _fit(
    directory: Path, family: Family, console: Console
) -> tuple[Fit, list[Observation], dict[str, str], list[float]]:
    """The law of the finished runs, those runs, the others with the reason, and bits per byte of a nat per token."""
    runs, left_out, bits = list(family.added), dict[str, str](), []
    for member in family.members:
        found = _observed(family, place_of(directory, member), member.name)
        if isinstance(found, str):
            left_out[member.name] = found
            console.warn(f"{member.name} is left out: {found}")
        else:
            runs.append(found[0])
            bits.append(found[1] / found[0].loss)
    if not bits:
        raise DataError(f"No run of {directory} is finished, so there is nothing to fit. Go on with --resume.")
    # The recipe's sizes were measured at equal times, in which a small network does fewer operations than a large one.
    in_time = family.budget.kind == "seconds"
    known = KnownBest(family.flops, _weights(family, family.recipe)) if in_time else None
    return fit_law(runs, known=known, repetitions=family.use.repetitions), runs, left_out, bits


def learn(directory: Path, run: Path, console: Console) -> tuple[Beside, Scaled]:
    """Sets the result of a finished run beside the law's prediction, and fits the law again with it.

    Raises `DataError` for a run that is not finished, or that is scored on other text than the family, and `UsageError`
    while another process works on the family.
    """
    Family.read(directory)
    with _at_work(directory):
        return _beside(directory, run), fitted(directory, console)


def _beside(directory: Path, run: Path) -> Beside:
    """Adds a finished run to the family, with the prediction that is made without it."""
    family, name = Family.read(directory), str(run)
    texts = {read_run(place_of(directory, each)).held_out for each in family.members if is_done(directory, each)}
    if read_run(run).held_out not in texts - {None}:
        raise DataError(f"{run} is not scored on the held-out text of {directory}, so the law says nothing of it.")
    found = _observed(family, run, name)
    if isinstance(found, str):
        raise DataError(f"{run}: {found}")
    observation = found[0]
    others = tuple(each for each in family.added if each.name != name)
    before, *_ = _fit(directory, replace(family, added=others), Console.silent())
    predicted, low, high = before.predict(observation.parameters, family.use.worth(observation.tokens))
    beside = Beside(name, observation.loss, predicted, low, high)
    kept = tuple(each for each in family.beside if each.name != name)
    replace(family, added=(*others, observation), beside=(*kept, beside)).write(directory)
    return beside


def finished_runs(directory: Path) -> list[Path]:
    """The directories of the runs of a family that have their score."""
    family = Family.read(directory)
    places = [place_of(directory, member) for member in family.members if is_done(directory, member)]
    return [place for place in places if failure_of(place) is None]


def _begin(request: ScaleRequest, console: Console) -> None:
    """Builds the corpus, measures the machine if a budget is in time, plans the family, and writes ``family.json``."""
    options = {"data": {"paths": [str(path) for path in request.paths]}, "seed": request.seed}
    given = read_settings(None, request.overrides, options=options)
    config = validate(SheepOpConfig, given)
    num_bytes, speed = text_bytes(config.data), 1.0
    if "seconds" in (request.budget.kind, request.spend and request.spend.kind):
        from sheepop.jobs.bench import training_speed  # loads torch

        speed = training_speed(config.device)

    def operations(budget: Budget) -> float:
        return budget.amount if budget.kind == "flops" else speed * budget.amount

    total = operations(request.budget)
    spend = _SPENT * total if request.spend is None else operations(request.spend)
    size = choose_size(total, TrainingConfig(max_minutes=1 / 60), num_bytes)
    place = _corpus(request, given, size, num_bytes, console)
    corpus = Corpus.open(place)
    if corpus.validation.num_tokens == 0:
        raise DataError(f"The corpus {place} has no held-out text, by which runs are compared. Build it with some.")
    vocab_size, unique, share = corpus.tokenizer().vocab_size, corpus.train.num_tokens, recipe_law().law.share
    recipe = Shape(size.d_model, size.num_layers, size.num_heads)
    weights = recipe.parameters(vocab_size)
    passes = total / (6 * weights * unique)
    shared = {
        "model": {**ARCHITECTURE, **own_parts(num_bytes, passes), "max_seq_len": _ROW_TOKENS},
        "training": {
            "optimizer": "muon", "schedule": "linear", "global_batch_size": _ROWS, "eval_stride": None, "memory": None,
        },
    }  # fmt: skip
    given = {name: value for name, value in given.items() if name not in ("data", "tokenizer")}
    settings = merge(shared, given)
    model, training = (settings[name] for name in ("model", "training"))
    step_tokens = int(model["max_seq_len"]) * int(training["global_batch_size"])
    members = plan_family(
        spend, vocab_size, lambda flops: weights * (flops / total) ** share, step_tokens, request.sizes
    )
    most_passes = None if model.get("ngrams") is None else MOST_PASSES_OF_NGRAMS
    use = Use(float(unique), request.repetitions, request.inference, most_passes)
    corpus_path = str(place.absolute())
    family = Family(corpus_path, vocab_size, unique, tuple(members), settings, request.budget, use, total, recipe)
    validate(SheepOpConfig, settings_of(family, members[0], request.output))
    if request.budget.kind == "seconds":
        family = replace(family, cost=_measured_cost(family, config.device, console))
    family.write(request.output)
    cost = sum(each.cost(vocab_size, step_tokens) for each in members)
    console.info(f"The family has {len(members)} runs, which cost {cost:.3g} operations together.")


def _corpus(request: ScaleRequest, given: Mapping[str, Any], size: Size, num_bytes: int, console: Console) -> Path:
    """The corpus of all runs: the one that is given, or one that is built here with the recipe's vocabulary."""
    if len(request.paths) == 1 and is_corpus(request.paths[0]):
        return request.paths[0]
    place = request.output / _CORPUS
    size = replace(size, vocab_size=min(size.vocab_size, _LARGEST_VOCABULARY))
    chosen = {} if given.get("tokenizer") else choose_tokenizer(size, num_bytes)
    settings = [f"tokenizer.{key}={value}" for key, value in chosen.items()]
    build([*map(str, request.paths), *request.overrides, *settings], place, None, console, shrinks=bool(chosen))
    return place


def _measured_cost(family: Family, device: str, console: Console) -> Cost:
    """The seconds of a token by the size, from steps of the shapes of the family with all cores."""
    from sheepop.core.device import resolve_device
    from sheepop.jobs.bench import measure_training

    place, times, sizes = resolve_device(device), [], []
    for shape in sorted({member.shape for member in family.members}, key=lambda shape: shape.blocks):
        config = validate(SheepOpConfig, settings_of(family, Member(shape, 1), Path(RUNS)))
        model = config.model.replace(vocab_size=family.vocab_size)
        row = measure_training(model, place, "fp32", _MEASURED_SECONDS, training=config.training, longest=_ROW_TOKENS)
        sizes.append(_weights(family, shape))
        times.append(1 / row["tokens_per_second"])
        console.info(f"{shape}: {row['tokens_per_second']:,.0f} tokens a second")
    return Cost.measured(sizes, times)


def _run_settings(family: Family, found: Recommended) -> dict[str, Any]:
    """The settings of the recommended run, for ``sheepop train --config``."""
    budget: dict[str, float] = {"max_tokens": round(found.tokens)}
    if family.budget.kind == "seconds":
        budget = {"max_minutes": family.budget.amount / 60}
    own = {
        "data": {"paths": [family.corpus]},
        "model": asdict(found.shape),
        "training": {"global_batch_size": found.rows, "learning_rate": found.learning_rate, **budget},
    }
    return merge(family.settings, own)


def _weights(family: Family, shape: Shape) -> int:
    """The weights that multiply a token in the family's network of this shape."""
    config = validate(SheepOpConfig, settings_of(family, Member(shape, 1), Path(RUNS))).model
    return _matrix_weights(config.replace(vocab_size=family.vocab_size))


def _matrix_weights(config: ModelConfig) -> int:
    from sheepop.model.accounting.cost import matrix_parameters  # loads torch

    return matrix_parameters(config)


def _observed(family: Family, place: Path, name: str) -> tuple[Observation, float] | str:
    """A finished run and its bits per byte, or the reason why it does not count."""
    if (failure := failure_of(place)) is not None:
        return failure
    try:
        found = read_run(place)
    except (SheepOpError, OSError) as error:
        return str(error)
    score = score_of(found)
    loss, bits, tokens = number(score.get("loss")), number(score.get("bits_per_byte")), found.summary.tokens
    if not score or tokens is None:
        return "It is not finished."
    if loss is None or bits is None or loss >= math.log(family.vocab_size):
        return f"It diverged: a guess has a loss of {math.log(family.vocab_size):.3g}, and this run has {loss}."
    config = validate(SheepOpConfig, read_settings(place / "config.yaml"))
    if config.model.vocab_size is None:
        return "Its configuration has no size of the vocabulary."
    return Observation(name, float(_matrix_weights(config.model)), float(tokens), loss, float(family.unique)), bits


@contextmanager
def _at_work(directory: Path) -> Iterator[None]:
    """Keeps other processes from a family; raises `UsageError` if one works on it."""
    existed, lock = directory.exists(), directory / _LOCK
    refusal = UsageError(f"Another process works on the family in {directory}. Wait until it ends.")
    advice = f"Finished runs are kept. Go on with: {typed('scale', '--resume', directory)}"
    with exclusive_lock(lock, refusal), interrupts_advise(advice):
        try:
            yield
        finally:
            if not existed and list(directory.iterdir()) == [lock]:
                remove_tree(directory)
