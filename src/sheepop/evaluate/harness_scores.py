"""Converts lm-eval's results of tasks and groups to evaluations."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from sheepop.evaluate.results import Evaluation, Item, Measure, mean_of

_Z = 1.96  # the 97.5 percent point of the normal distribution
_INTERVAL = " The interval is 1.96 of lm-eval's standard errors to either side."
_CHOICE = "How often the right choice has the highest "
# By metric, or by output type and metric.
_DEFINITIONS = {
    "acc": f"{_CHOICE}log-probability.",
    "acc_norm": f"{_CHOICE}log-probability for each character of its text.",
    "acc_bytes": f"{_CHOICE}log-probability for each byte of its text.",
    "acc_mutual_info": f"{_CHOICE}log-probability minus its log-probability without a prompt.",
    "loglikelihood acc": "How often greedy decoding would give the right text.",
    "exact_match": "How often the generated text is the right one, after the changes in the task file.",
    "multiple_choice exact_match": "How often greedy decoding would give the right choice.",
    "perplexity": "e to the power of minus the right text's log-probability, which is averaged over questions.",
    "word_perplexity": "e to the power of minus the log-probability of all text for each of its words.",
    "byte_perplexity": "e to the power of minus the log-probability of all text for each of its UTF-8 bytes.",
    "bits_per_byte": "Minus the binary logarithm of the probability of all text, for each of its UTF-8 bytes.",
    "brier_score": "The squared distance of the choices' probabilities from 1 for the right one and 0 for others.",
    "f1": "F1 over all questions: the harmonic mean of precision and recall.",
    "mcc": "Matthews' correlation coefficient of chosen and right answers.",
    "bleu": "BLEU by sacrebleu, from 0 to 100: n-grams that generated and right texts share.",
    "chrf": "chrF by sacrebleu, from 0 to 100: n-grams of characters that generated and right texts share.",
    "chrf++": "chrF++ by sacrebleu, from 0 to 100: n-grams of characters and words that both texts share.",
    "ter": "Translation edit rate by sacrebleu: edits that make the right text, in percent of its words.",
}


def evaluations_of(
    tasks: Mapping[str, Any],
    groups: Mapping[str, Any],
    results: Mapping[str, Any],
    notes: Sequence[str],
    settings: Mapping[str, Any],
) -> list[Evaluation]:
    """Evaluations of the groups that have scores, and of all tasks; a note that names tasks goes only to these."""
    names = [*groups, *tasks]
    naming = {name: re.compile(rf"\b{re.escape(name)}\b") for name in names}
    of_all = [note for note in notes if not any(naming[name].search(note) for name in tasks)]
    notes_of = {name: [note for note in notes if note in of_all or naming[name].search(note)] for name in names}
    settings = {name: {**settings, **_settings(results, name)} for name in names}
    found = {name: _of_task(task, results, notes_of[name], settings[name]) for name, task in tasks.items()}
    whole = [
        _of_group(group, results, found, notes_of[name], settings[name])
        for name, group in groups.items()
        if name in results.get("groups", {})
    ]
    return [*whole, *found.values()]


def _settings(results: Mapping[str, Any], name: str) -> dict[str, Any]:
    config = results["configs"].get(name, {})
    dataset = [config[key] for key in ("dataset_path", "dataset_name") if config.get(key)]
    return {
        "version": results["versions"].get(name),
        "num_fewshot": results["n-shot"].get(name),
        **({"dataset": " ".join(map(str, dataset))} if dataset else {}),
    }


def _of_task(task: Any, results: Mapping[str, Any], notes: Sequence[str], settings: Mapping[str, Any]) -> Evaluation:
    name = task.task_name
    samples = results["samples"][name]
    counts = Counter(_measure_name(metric, sample["filter"]) for sample in samples for metric in sample["metrics"])
    measures = [
        Measure(
            _measure_name(metric, kept),
            value,
            _definition(task, metric, kept) + (_INTERVAL if interval else ""),
            counts[_measure_name(metric, kept)],
            interval,
            results["higher_is_better"][name].get(metric) is not False,
        )
        for metric, kept, value, interval in _numbers(results["results"][name])
    ]
    return Evaluation("tasks", name, measures, _consistent(measures, _items(task, samples)), (), notes, settings)


def _of_group(
    group: Any,
    results: Mapping[str, Any],
    tasks: Mapping[str, Evaluation],
    notes: Sequence[str],
    settings: Mapping[str, Any],
) -> Evaluation:
    found = results["groups"][group.name]
    parts = [tasks[task.task_name] for task in group.get_all_tasks()]
    by_size = {metric.metric: metric.weight_by_size for metric in group.aggregate_metric_list}
    measures = []
    for metric, kept, value, interval in _numbers(found):
        weighted = "weighted by their questions" if by_size[metric] else "which count the same"
        definition = f"{_measure_name(metric, kept)} of {len(parts)} tasks on average, {weighted}."
        higher = results["higher_is_better"].get(group.name, {}).get(metric) is not False
        count = found["sample_count"][f"{metric},{kept}"]
        definition += _INTERVAL if interval else ""
        measures.append(Measure(_measure_name(metric, kept), value, definition, count, interval, higher))
    items = [
        Item(
            f"{part.name}: {item.id}",
            item.values,
            1.0 if all(by_size.values()) else 1 / len(part.items),
            {key: item.shown[key] for key in ("prompt", "reference") if key in item.shown},
        )
        for part in parts
        for item in part.items
    ]
    return Evaluation("tasks", group.name, measures, _consistent(measures, items), (), notes, settings)


def _numbers(found: Mapping[str, Any]) -> Iterator[tuple[str, str, float, tuple[float, float] | None]]:
    """Metric, filter, value and interval of each score in lm-eval's results."""
    for key, value in found.items():
        metric, comma, kept = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, Real):
            continue
        error = found.get(f"{metric}_stderr,{kept}")
        half = _Z * float(error) if isinstance(error, Real) else math.nan
        yield metric, kept, float(value), None if math.isnan(half) else (float(value) - half, float(value) + half)


def _measure_name(metric: str, kept: str) -> str:
    """The metric, followed by the filter that extracted the answers, if there was one."""
    return metric if kept == "none" else f"{metric},{kept}"


def _definition(task: Any, metric: str, kept: str) -> str:
    """The definition of a metric; for one that the task computes itself, a reference to its file."""
    known = _DEFINITIONS.get(f"{task.OUTPUT_TYPE} {metric}", _DEFINITIONS.get(metric))
    source = (task.config.metadata or {}).get("config_source", "of lm-eval")
    if known is None or callable(task.config.process_results):
        return f"{metric} as the task file {source} defines it."
    return known if kept == "none" else f"{known} The filter {kept} of the task file extracts the answer."


def _items(task: Any, samples: Sequence[Mapping[str, Any]]) -> list[Item]:
    """One item for each document; lm-eval has one sample for each document and filter."""
    documents: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in samples:
        documents[f"{sample['doc_id']}-{sample['doc_hash'][:16]}"].append(sample)
    items = []
    for name, found in documents.items():
        values: dict[str, float] = {}
        weight = 1.0
        for sample in found:
            for metric in sample["metrics"]:
                value = sample[metric]
                if isinstance(value, Real):
                    values[_measure_name(metric, sample["filter"])] = float(value)
                elif metric == "bits_per_byte" and value[1]:
                    weight = float(value[1])
                    values[metric] = -float(value[0]) / weight / math.log(2)
        items.append(Item(name, values, weight, _shown(task, found)))
    return items


def _consistent(measures: Sequence[Measure], items: Sequence[Item]) -> list[Item]:
    """Removes the values of measures that are not the mean of their items' values, such as F1."""
    means = {measure.name: (measure.value, mean_of(items, measure.name)) for measure in measures}
    names = {
        name for name, (value, mean) in means.items() if mean is not None and math.isclose(mean, value, abs_tol=1e-9)
    }
    return [
        replace(item, values={name: value for name, value in item.values.items() if name in names}) for item in items
    ]


def _shown(task: Any, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The question and the answers for the report; `asked` is the whole prompt if it is longer than the question."""
    sample = samples[0]
    context = sample["arguments"][0][0]
    # Some metrics add requests with another context: an empty one, or the question with another choice in it.
    alike = [number for number, arguments in enumerate(sample["arguments"]) if arguments[0] == context]
    own = task.doc_to_text(sample["doc"])
    shown: dict[str, Any] = {"prompt": own if isinstance(own, str) else context}
    if shown["prompt"] != context:
        shown["asked"] = context
    target = sample["target"]
    if task.OUTPUT_TYPE == "generate_until":
        written = [text for answers in sample["resps"] for text in answers]
        found = {each["filter"]: each["filtered_resps"][0] for each in samples if each["filter"] != "none"}
        return {**shown, "reference": str(target), "written": written, **({"found": found} if found else {})}
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        return {"prompt": context, "logprob": sample["resps"][0][0]}
    choices = [sample["arguments"][number][1] for number in alike]
    shown |= {"choices": choices, "logprobs": [sample["resps"][number][0][0] for number in alike]}
    if isinstance(target, int) and 0 <= target < len(choices):
        return {**shown, "answer": target, "reference": choices[target]}
    return {**shown, "answer": str(target), "reference": str(target)}
