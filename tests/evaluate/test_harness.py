"""Tasks of lm-eval asked of our models, beside lm-eval's own backend asking the same models in transformers."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint import load_model
from sheepop.core.errors import ConfigError, DataError, UsageError
from sheepop.evaluate.harness import ask_tasks, load_tasks
from sheepop.evaluate.harness_model import Answers, generation_config
from sheepop.evaluate.results import Evaluation
from sheepop.generate import Generator
from sheepop.jobs.exchange import import_model
from sheepop.model import ModelConfig, build_model
from sheepop.tokenizer import CharTokenizer

pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
tokenizers = pytest.importorskip("tokenizers")

CONTEXT = 96
WORDS = [*"ABCD", "a", "the", "sheep", "jumps", "over", "fence", "sleeps", "in", "green", "grass", "wind", "moves"]
TASKS = ("endings", "letters", "words", "prose", "answers")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

ENDINGS = """
task: endings
output_type: multiple_choice
training_split: train
test_split: test
fewshot_split: train
num_fewshot: 2
doc_to_text: story
doc_to_choice: endings
doc_to_target: right
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
  - metric: acc_bytes
    aggregation: mean
    higher_is_better: true
metadata:
  version: 3.5
"""
LETTERS = """
task: letters
output_type: multiple_choice
test_split: test
doc_to_text: story
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: letter
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
LAST_WORD = """
task: words
output_type: loglikelihood
test_split: test
doc_to_text: story
doc_to_target: " {{endings[0]}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
PROSE = """
task: prose
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: prose
metric_list:
  - metric: word_perplexity
    aggregation: weighted_perplexity
    higher_is_better: false
  - metric: byte_perplexity
    aggregation: weighted_perplexity
    higher_is_better: false
  - metric: bits_per_byte
    aggregation: bits_per_byte
    higher_is_better: false
"""
ANSWERS = """
task: answers
output_type: generate_until
training_split: train
test_split: test
fewshot_split: train
num_fewshot: 1
doc_to_text: "{{story}} =>"
doc_to_target: t
generation_kwargs:
  until: ["\\n", "th"]
  max_gen_toks: 12
  do_sample: false
filter_list:
  - name: whole
    filter:
      - function: take_first
  - name: first
    filter:
      - function: regex
        regex_pattern: "([a-z])"
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
GROUP = """
group: both
task: [endings, letters]
aggregate_metric_list:
  - metric: acc
    weight_by_size: {by_size}
metadata:
  version: 2
"""


@dataclass(frozen=True)
class Pair:
    """The same model in both systems: theirs with its tokenizer, ours as a generator."""

    theirs: Any
    tokenizer: Any
    ours: Generator


def write_tasks(folder: Path) -> Path:
    """Task files over made-up documents: some share beginnings, one has none, one ends in spaces, one is too long."""
    draw = random.Random(5)

    def some(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    def document(number: int) -> dict[str, Any]:
        story = some(14 if number % 3 else 40) if number not in (2, 5) else ["", some(3) + "  "][number == 5]
        endings = [some(draw.randrange(1, 7)) for _ in range(4)]
        letter = draw.choice("ABCD")
        prose = some(draw.choice((3, 30, 220)))
        return {"story": story, "endings": endings, "right": draw.randrange(4), "letter": letter, "prose": prose}

    for name, count in (("train", 6), ("test", 18)):
        rows = [json.dumps(document(number + (0 if name == "test" else 6))) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    files = f"{{train: {folder}/train.jsonl, test: {folder}/test.jsonl}}"
    for text in (ENDINGS, LETTERS, LAST_WORD, PROSE, ANSWERS):
        name = text.split("task: ")[1].split("\n")[0]
        (folder / f"{name}.yaml").write_text(f"dataset_path: json\ndataset_kwargs: {{data_files: {files}}}{text}")
    (folder / "both.yaml").write_text(GROUP.format(by_size="true"))
    (folder / "even.yaml").write_text(GROUP.format(by_size="false").replace("both", "even"))
    return folder


def build_tokenizer(*, begins: bool) -> Any:
    """Byte-level BPE of a few merges; with `begins` it puts a beginning before every text, as Llama's does."""
    special = ["<s>", "</s>"] if begins else ["<|endoftext|>"]
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=310, special_tokens=special, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    library.train_from_iterator(["".join(f" {word}" for word in WORDS)] * 3, trainer)
    if begins:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", library.token_to_id("<s>"))]
        )
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token=special[0], eos_token=special[-1], clean_up_tokenization_spaces=False
    )
    found.chat_template = TEMPLATE
    return found


def build_pair(folder: Path, family: str) -> Pair:
    tokenizer = build_tokenizer(begins=family == "llama")
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, **ids
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=CONTEXT, **ids,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 0.25, generator=generator)
    model.eval().save_pretrained(folder / "theirs")
    tokenizer.save_pretrained(folder / "theirs")
    import_model(folder / "theirs", folder / "ours")
    loaded = load_model(folder / "ours")
    return Pair(model, tokenizer, Generator(loaded.model, loaded.tokenizer, max_batch_size=4))


@pytest.fixture(scope="module", autouse=True)
def cache_of_datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp(request.param), request.param)


Asked = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask_theirs(tasks: Path, pair: Pair) -> Asked:
    """lm-eval with its backend for transformers."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=pair.theirs, tokenizer=pair.tokenizer, batch_size=3, device="cpu")

    def ask(names: tuple[str, ...], **options: Any) -> dict[str, Any]:
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        return simple_evaluate(model, tasks=list(names), task_manager=manager, bootstrap_iters=1000, **options)

    return ask


@pytest.fixture(scope="module")
def theirs(ask_theirs: Asked) -> dict[str, Any]:
    return ask_theirs(TASKS)


def run_tasks(generator: Generator, names: Any, *, seed: int = 0, **settings: Any) -> list[Evaluation]:
    loading = {key: settings.pop(key) for key in ("include", "num_fewshot") if key in settings}
    return ask_tasks(generator, load_tasks(names, seed=seed, **loading), seed=seed, **settings)


@pytest.fixture(scope="module")
def ours(pair: Pair, tasks: Path) -> dict[str, Evaluation]:
    return {found.name: found for found in run_tasks(pair.ours, TASKS, include=[tasks])}


def their_scores(theirs: dict[str, Any], task: str) -> dict[str, float]:
    return {
        key.removesuffix(",none"): value
        for key, value in theirs["results"][task].items()
        if "," in key and "_stderr" not in key
    }


@pytest.mark.parametrize("task", ["endings", "letters", "answers"])
def test_scores_that_count_right_answers_are_those_of_lm_eval_to_the_last_digit(ours, theirs, task):
    assert {measure.name: measure.value for measure in ours[task].measures} == their_scores(theirs, task)


@pytest.mark.parametrize("task", ["words", "prose"])
def test_scores_of_likelihoods_are_those_of_lm_eval(ours, theirs, task):
    assert {m.name: m.value for m in ours[task].measures} == pytest.approx(their_scores(theirs, task), rel=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_every_document_is_answered_as_lm_eval_answers_it(ours, theirs, task):
    samples = [sample for sample in theirs["samples"][task] if sample["filter"] in ("none", "whole")]
    assert [item.id for item in ours[task].items] == [f"{s['doc_id']}-{s['doc_hash'][:16]}" for s in samples]
    for item, sample in zip(ours[task].items, samples, strict=True):
        if task == "answers":
            assert item.shown["written"] == sample["resps"][0]
            assert item.values["exact_match,whole"] == sample["exact_match"]
        elif task == "prose":
            assert item.shown["logprob"] == pytest.approx(sample["resps"][0][0], abs=1e-4 * len(sample["doc"]["prose"]))
        else:
            assert item.shown["logprobs"] == pytest.approx([answer[0][0] for answer in sample["resps"]], abs=1e-4)
            assert [item.shown["asked" if "asked" in item.shown else "prompt"], *item.shown["choices"]] == [
                sample["arguments"][0][0],
                *(asked[1] for asked in sample["arguments"]),
            ]


def test_the_documents_reach_every_case(ours, pair):
    """Long texts lose their beginning, choices are of one token and of several, and filters find some answers."""
    assert any("texts of endings were longer than the context of 96" in note for note in ours["endings"].notes)
    assert not ours["prose"].notes
    assert {len(pair.ours.tokenizer.encode(choice)) for choice in ours["letters"].items[0].shown["choices"]} == {1}
    assert max(len(pair.ours.tokenizer.encode(choice)) for choice in ours["endings"].items[0].shown["choices"]) > 3
    assert max(len(pair.ours.tokenizer.encode(item.shown["prompt"])) for item in ours["prose"].items) > 2 * CONTEXT
    assert 0 < ours["endings"].measure("acc").value < 1
    assert any(len(text) > 3 for item in ours["answers"].items for text in item.shown["written"])
    assert len({item.shown["found"]["first"] for item in ours["answers"].items}) > 2


def test_a_shorter_context_is_that_of_lm_eval(pair, tasks):
    """Whole texts are read in windows of this length, and other texts lose their beginning."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    names = ["endings", "prose"]
    model = HFLM(pretrained=pair.theirs, tokenizer=pair.tokenizer, batch_size=3, device="cpu", max_length=40)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    expected = simple_evaluate(model, tasks=names, task_manager=manager, bootstrap_iters=0, limit=6)
    for found in run_tasks(pair.ours, names, include=[tasks], limit=6, context=40):
        scores = {measure.name: measure.value for measure in found.measures}
        assert scores == pytest.approx(their_scores(expected, found.name), rel=1e-5)
        assert found.settings["context"] == 40
    with pytest.raises(UsageError, match="context = 97 must be at least 1 and at most the model's context of 96"):
        run_tasks(pair.ours, names, include=[tasks], context=97)


def test_a_measure_is_defined_and_its_interval_is_made_of_the_standard_error(ours, theirs):
    measure = ours["endings"].measure("acc")
    half = 1.96 * theirs["results"]["endings"]["acc_stderr,none"]
    assert measure.interval == pytest.approx((measure.value - half, measure.value + half))
    assert (measure.count, measure.higher_is_better) == (18, True)
    assert measure.definition.startswith("How often the right choice has the highest log-probability. The interval")
    assert not ours["words"].measure("perplexity").higher_is_better
    assert ours["prose"].measure("byte_perplexity").interval is None
    assert "filter first" in ours["answers"].measure("exact_match,first").definition


def test_the_values_of_items_give_their_measure_and_others_are_left_out(ours):
    for task in TASKS:
        for name in {name for item in ours[task].items for name in item.values}:
            mean = sum(item.values[name] * item.weight for item in ours[task].items)
            total = sum(item.weight for item in ours[task].items)
            assert mean / total == pytest.approx(ours[task].measure(name).value)
    assert set(ours["prose"].items[0].values) == {"bits_per_byte"}
    assert set(ours["words"].items[0].values) == {"acc"}


def test_evaluations_are_plain_data(ours):
    for found in ours.values():
        rows = [[item.id, item.values, item.weight, item.shown] for item in found.items]
        assert json.loads(json.dumps([found.to_dict(), rows]))


def test_settings_name_the_versions_the_examples_and_the_dataset(ours):
    from importlib.metadata import version

    assert ours["endings"].settings == {
        "lm_eval": version("lm_eval"), "limit": None, "seed": 0, "chat": False, "version": 3.5, "num_fewshot": 2,
        "dataset": "json",
    }  # fmt: skip


@pytest.mark.parametrize("pair", ["gpt2"], indirect=True)
@pytest.mark.parametrize(("group", "by_size"), [("both", True), ("even", False)])
def test_a_group_has_the_score_that_lm_eval_gives_it_and_the_items_of_its_tasks(
    pair, tasks, ask_theirs, group, by_size
):
    found = run_tasks(pair.ours, [group], include=[tasks], limit=7)
    expected = ask_theirs((group,), limit=7)["groups"][group]
    measure = found[0].measure("acc")
    assert [each.name for each in found] == [group, "endings", "letters"]
    assert (measure.value, measure.count) == (expected["acc,none"], 14)
    assert measure.interval[1] - measure.value == pytest.approx(1.96 * expected["acc_stderr,none"])
    assert ("weighted by their questions" in measure.definition) == by_size
    assert len(found[0].items) == 14 and found[0].settings["version"] == "2"
    assert sum(i.values["acc"] * i.weight for i in found[0].items) / sum(
        i.weight for i in found[0].items
    ) == pytest.approx(measure.value)


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_the_chat_template_and_the_number_of_examples_are_those_of_lm_eval(pair, tasks, ask_theirs, tmp_path):
    names = ("endings", "answers")
    expected = ask_theirs(names, limit=5, num_fewshot=3, apply_chat_template=True)
    found = run_tasks(pair.ours, names, include=[tasks], limit=5, num_fewshot=3, chat=True)
    for evaluation in found:
        samples = [s for s in expected["samples"][evaluation.name] if s["filter"] in ("none", "whole")]
        assert [item.shown["asked"] for item in evaluation.items] == [s["arguments"][0][0] for s in samples]
        assert {m.name: m.value for m in evaluation.measures} == their_scores(expected, evaluation.name)
        assert evaluation.settings["num_fewshot"] == 3
    assert found[1].items[0].shown["asked"].startswith("<s>[user]")


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_begun_answer_ends_the_chat_and_a_refused_system_message_is_left_out(pair):
    from lm_eval.models.huggingface import HFLM

    from sheepop.tokenizer import ChatTemplate

    theirs = HFLM(pretrained=pair.theirs, tokenizer=pair.tokenizer, device="cpu")
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Who jumps?"},
        {"role": "assistant", "content": "The answer is "},
    ]
    with ChatTemplate.of(pair.ours.tokenizer) as template:
        answers = Answers(pair.ours, template)
        begun = answers.render(messages, add_generation_prompt=False)
        asked = answers.render(messages[:2], add_generation_prompt=True)
    assert begun == theirs.apply_chat_template(messages, add_generation_prompt=False)
    assert asked == theirs.apply_chat_template(messages[:2], add_generation_prompt=True)
    assert "has no system message" in answers.take_notes("chats")[0]


def test_another_seed_chooses_other_examples_and_the_same_one_the_same(tasks):
    def asked(seed: int) -> list[str]:
        (found,) = run_tasks(generator(), ["endings"], include=[tasks], limit=3, seed=seed)
        return [item.shown["asked"] for item in found.items]

    assert asked(0) == asked(0) != asked(1)


def test_nothing_is_printed_and_the_callers_randomness_and_logger_stay(tasks, capfd):
    logger = logging.getLogger("lm_eval")
    random.seed(7)
    before, handlers, level = random.getstate(), list(logger.handlers), logger.level
    done: list[int] = []
    run_tasks(generator(), ["letters", "answers"], include=[tasks], limit=3, num_fewshot=1, on_progress=done.append)
    assert capfd.readouterr() == ("", "")
    assert random.getstate() == before and (logger.handlers, logger.level) == (handlers, level)
    assert sum(done) == 3 * 4 + 3


def test_texts_that_are_drawn_follow_the_seed_and_differ_between_repetitions(tasks, tmp_path):
    text = (tasks / "answers.yaml").read_text().replace("do_sample: false", "temperature: 1.5\nrepeats: 2")
    (tmp_path / "drawn.yaml").write_text(text.replace("task: answers", "task: drawn"))

    def written(seed: int) -> list[list[str]]:
        (found,) = run_tasks(generator(), ["drawn"], include=[tmp_path], limit=3, num_fewshot=0, seed=seed)
        return [item.shown["written"] for item in found.items]

    assert written(0) == written(0) != written(1)
    assert all(first != second for first, second in written(0))


def test_generation_settings_mean_what_they_mean_to_lm_eval():
    greedy = generation_config({"until": "\n", "temperature": 0.7, "do_sample": False}, ["</s>"])
    assert (greedy.temperature, greedy.max_new_tokens, greedy.stop) == (0.0, 256, ("\n", "</s>"))
    drawn = generation_config({"temperature": 0.7, "max_gen_toks": 9, "max_new_tokens": 5, "num_beams": 1}, [])
    assert (drawn.temperature, drawn.max_new_tokens, drawn.top_k, drawn.top_p) == (0.7, 9, 50, 1.0)
    assert generation_config({"temperature": 1.0, "top_k": 0}, []).top_k is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"early_stopping": True}, "have early_stopping. SheepOp knows until"),
        ({"num_beams": 4}, "have num_beams"),
        ({"do_sample": True}, "do_sample without a temperature"),
    ],
)
def test_generation_settings_that_would_be_dropped_are_refused_by_name(settings, message):
    with pytest.raises(DataError, match=message):
        generation_config(settings, [])


def test_generation_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="top_p"):
        generation_config({"temperature": 1.0, "top_p": 7.0}, [])


def generator(**changes: Any) -> Generator:
    settings = {"vocab_size": 128, "d_model": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 512}
    return Generator(build_model(ModelConfig(**{**settings, **changes}), 0).eval(), CharTokenizer())


def changed(tasks: Path, folder: Path, name: str, old: str, new: str) -> Path:
    text = (tasks / f"{name}.yaml").read_text()
    assert old in text
    (folder / "changed.yaml").write_text(text.replace(old, new).replace(f"task: {name}", "task: changed"))
    return folder


@pytest.mark.parametrize(
    ("task", "old", "new", "message"),
    [
        ("letters", "doc_to_target: letter", "", "changed.yaml: TypeError.* It has no doc_to_target"),
        ("letters", "doc_to_text: story", "doc_to_text: '{{story.nothing.at.all}}'", "UndefinedError"),
        ("letters", "output_type: multiple_choice", "output_type: poem", "Got invalid output_type 'poem'"),
        ("letters", "test_split: test", "test_splt: test", "unexpected keyword argument 'test_splt'"),
        ("letters", "metric_list:", "metric_list: [", "changed.yaml: (Parser|Scanner)Error"),
        ("letters", "test.jsonl", "missing.jsonl", "Unable to find .*missing.jsonl"),
        ("letters", "dataset_path: json", "dataset_path: sheep/wool", "its dataset sheep/wool is not .*path: json"),
        ("endings", "num_fewshot: 2", "num_fewshot: 99", "changed cannot be run: ValueError: .*larger"),
        ("answers", "max_gen_toks: 12", "max_gen_toks: 512", "write 512 tokens, but its context of 512"),
        ("answers", "do_sample: false", "penalty: 3", "generation_kwargs have penalty"),
    ],
)
def test_a_task_that_cannot_be_asked_is_refused_with_its_file_and_the_reason(tasks, tmp_path, task, old, new, message):
    with pytest.raises(DataError, match=message):
        run_tasks(generator(), ["changed"], include=[changed(tasks, tmp_path, task, old, new)], limit=2)


def test_a_task_that_runs_code_is_sent_to_the_sandbox(tasks, tmp_path):
    include = changed(tasks, tmp_path, "letters", "output_type:", "unsafe_code: true\noutput_type:")
    (include / "group.yaml").write_text("group: programs\ntask: [changed]\n")
    for name in ("changed", "programs", str(include / "changed.yaml"), "humaneval"):
        with pytest.raises(UsageError, match=r"runs programs .* Use sheepop eval code, which runs them in a sandbox"):
            run_tasks(generator(), [name], include=[include])


def test_a_benchmark_whose_dataset_is_not_here_is_refused_with_its_name():
    with pytest.raises(DataError, match=r"hellaswag cannot be loaded.* dataset Rowan/hellaswag is not on this machine"):
        run_tasks(generator(), ["hellaswag"])


def test_a_task_that_is_asked_twice_or_a_directory_that_is_none_is_refused(tasks, tmp_path):
    with pytest.raises(UsageError, match="letters would run twice"):
        run_tasks(generator(), ["letters", "letters"], include=[tasks])
    with pytest.raises(UsageError, match="nowhere is no directory"):
        run_tasks(generator(), ["letters"], include=[tmp_path / "nowhere"])


def test_an_unknown_task_is_refused_with_the_nearest_names(tasks):
    with pytest.raises(UsageError, match=r"no task hellaswagg\. Did you mean hellaswag.*--include"):
        run_tasks(generator(), ["hellaswagg"], include=[tasks])


def test_a_model_that_continues_no_text_is_refused(tasks):
    settings = {"vocab_size": 128, "d_model": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 64}
    model = build_model(ModelConfig(architecture="encoder_decoder", **settings), 0).eval()
    with pytest.raises(UsageError, match="encoder-decoder"):
        run_tasks(Generator(model, CharTokenizer()), ["letters"], include=[tasks])


def test_without_lm_eval_the_extra_is_named(tasks, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    with pytest.raises(UsageError, match=r'pip install "sheepop\[eval\]"'):
        run_tasks(generator(), ["letters"], include=[tasks])
