"""What judges answers: programs within limits, services on loopback, and what either may do wrong."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sheepop.core.errors import ConfigError, TrainingError
from sheepop.jobs.task.reward_sources import open_reward
from sheepop.posttrain.conversations import Question, Transcript
from sheepop.posttrain.rewards import Answer, Reward, Writer, Written, answered
from sheepop.tokenizer import Tokenizer

ANSWERS = [
    Answer("one plus two", " three", [1, 2], {"answer": "three"}),
    Answer("two", " x" * 200, [1], {"answer": "y"}),
]


@pytest.fixture
def opened(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> Iterator[Any]:
    """``opened(source)``: a program with this text as a reward, or the address itself."""
    found: list[Reward] = []

    def make(source: str, seconds: float = 5.0, **options: Any) -> Reward:
        place = source
        if not source.startswith("http"):
            folder = tmp_path / str(len(found))
            folder.mkdir()
            (folder / "judge.py").write_text(source)
            place = str(folder / "judge.py")
        found.append(open_reward(place, seconds, tokenizers["bpe"], device="cpu", batch_size=2, **options))
        return found[-1]

    yield make
    for reward in found:
        reward.close()


def test_a_program_gets_prompt_answer_and_fields(opened: Any) -> None:
    reward = opened(
        "import json\n"
        "def reward(prompt, completion, answer, **fields):\n"
        "    return len(prompt) + 100 * (completion.strip() == answer)\n"
    )
    assert reward(ANSWERS) == [112.0, 3.0]
    assert reward([]) == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise ValueError('no judge')", r"judge\.py failed for the answer ' three': ValueError: no judge"),
        ("return float('nan')", r"gave nan for the answer ' three', which is not a finite number"),
        ("return -float('inf')", r"gave -inf for the answer ' three', which is not a finite number"),
        ("return 'good'", r"gave 'good' for the answer ' three', which is not a finite number"),
        ("return [1.0]", r"failed for the answer ' three': TypeError: float\(\) argument must be"),
        ("import time; time.sleep(60)", r"took more than 1 s for the answer ' three'"),
        ("return 1.0 if len(completion) < 9 else 1 / 0", r"failed for the answer ' x x.*\.\.\.: ZeroDivisionError"),
        ("import os; os._exit(3)", r"ended at the answer ' three'"),
        ("return bytearray(2**34)[0]", r"ended at the answer ' three'|failed for the answer ' three': MemoryError"),
    ],
)
def test_a_program_that_does_wrong_is_named_with_the_answer(opened: Any, body: str, problem: str) -> None:
    reward = opened(f"def reward(prompt, completion, **fields):\n    {body}\n", seconds=60.0)
    if "sleep" in body:
        reward._seconds = 1.0  # once it is open
    with pytest.raises(TrainingError, match=problem):
        reward(ANSWERS)


ALL_AT_ONCE = """
import os

def reward(prompts, answers, answer, **columns):
    if 'end' in answer:
        os._exit(3)
    assert columns == {'other': [None, 4]}
    return [len(prompt) + 100 * (text.strip() == right) if right else None
            for prompt, text, right in zip(prompts, answers, answer, strict=True)]
"""


def test_a_program_gets_all_answers_at_once_with_the_columns_of_their_lines(opened: Any) -> None:
    reward = opened(ALL_AT_ONCE)
    second = Answer("two", " x", [1], {"answer": "", "other": 4})
    assert reward([ANSWERS[0], second]) == [112.0, None]
    with pytest.raises(TrainingError, match=r"judge\.py ended at 2 answers"):
        reward([ANSWERS[0], Answer("two", " x", [1], {"answer": "end", "other": 4})])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return [1.0]", "gave 1 rewards for 2 answers"),
        ("return [1.0, 2.0, 3.0]", "gave 3 rewards for 2 answers"),
        ("return None", "failed for 2 answers: TypeError: 'NoneType' object is not iterable"),
        ("return [1.0, float('inf')]", r"gave inf for the answer ' x x.*, which is not a finite number"),
        ("return [float('nan'), None]", "gave nan for the answer ' three', which is not a finite number"),
        ("raise ValueError('no judge')", "failed for 2 answers: ValueError: no judge"),
        ("import time; time.sleep(60)", r"took more than 0.5 s each for 2 answers\. Fix it, or give it more time"),
    ],
)
def test_a_program_that_does_wrong_with_all_answers_is_named(opened: Any, body: str, problem: str) -> None:
    reward = opened(f"def reward(completions, **columns):\n    {body}\n", seconds=60.0)
    if "sleep" in body:
        reward._seconds = 0.5  # once it is open
    with pytest.raises(TrainingError, match=problem):
        reward(ANSWERS)


ASKED = [{"role": "user", "content": "one plus two"}]
SAID = [{"role": "assistant", "content": " three"}]
CHAT = Answer("<user>one plus two<model>", " three", [1, 2], {"answer": "three"}, ASKED, SAID)
SEEN = """
def reward({parameters}):
    import json
    raise ValueError(json.dumps({seen}))
"""


@pytest.mark.parametrize(
    ("parameters", "seen", "expected"),
    [
        (
            "prompts, completions, answer, **columns",
            "[prompts, completions, answer]",
            [[ASKED, "two"], [SAID, " x"], ["three", "y"]],
        ),
        ("completions, **columns", "completions", [SAID, " x"]),
        ("prompts, answers, **columns", "[prompts, answers]", [["<user>one plus two<model>", "two"], [" three", " x"]]),
        ("completions, answers, **columns", "[answers, columns]", [[" three", " x"], {"answer": ["three", "y"]}]),
    ],
)
def test_what_a_program_gets_is_said_by_its_parameters(opened: Any, parameters: str, seen: str, expected: Any) -> None:
    reward = opened(SEEN.format(parameters=parameters, seen=seen))
    with pytest.raises(TrainingError) as found:
        reward([CHAT, Answer("two", " x", [1], {"answer": "y"})])
    assert json.loads(str(found.value).partition("ValueError: ")[2]) == expected


def test_an_answer_to_a_conversation_has_its_messages_and_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = answered(Question([1, 2], {"answer": "three"}, ASKED, tools), "<user>one", " three", [3])
    assert answer == Answer("<user>one", " three", [1, 2, 3], {"answer": "three", "tools": tools}, ASKED, SAID)
    assert answered(Question([1], {}), "one", " x", [3]) == Answer("one", " x", [1, 3])


def test_a_key_of_a_line_with_the_name_of_another_argument_is_named(opened: Any) -> None:
    reward = opened("def reward(prompts, answers, **columns): return [1.0] * len(prompts)\n")
    with pytest.raises(TrainingError, match="the key answers of the prompts' lines has the name of another argument"):
        reward([Answer("two", " x", [1], {"answers": ["y"]})])
    with pytest.raises(ConfigError, match=r"has no parameter answers \(texts\) or completions \(messages\)"):
        opened("def reward(prompts, **columns): return [1.0] * len(prompts)\n")


def test_an_answer_that_a_program_fails_for_has_no_reward_if_it_may_fail(opened: Any) -> None:
    one_by_one = opened(
        "def reward(prompt, completion, **fields):\n    return 1 / (len(completion) > 9)\n", may_fail=True
    )
    assert one_by_one([*ANSWERS, ANSWERS[0]]) == [None, 1.0, None]
    slow = opened("import time\ndef reward(prompt, completion, **fields): time.sleep(60)\n", may_fail=True)
    slow._seconds = 0.2  # less than a busy machine may need to open it
    assert slow(ANSWERS) == [None, None]
    assert opened("def reward(prompts, answers, **columns): 1 / 0\n", may_fail=True)(ANSWERS) == [None, None]


def test_several_rewards_are_added_with_their_weights(opened: Any, tokenizers: dict[str, Tokenizer]) -> None:
    length = opened("def reward(prompts, answers, **columns): return [len(text) for text in answers]\n")
    right = opened(
        "def reward(prompt, completion, answer):\n    return None if answer == 'y' else completion.strip() == answer\n"
    )
    writer = Writer(tokenizers["bpe"], {"length": (0.5, length), "right": (10.0, right)}, 4, 1.0)
    parts = writer._judged(ANSWERS)
    assert parts == [{"length": 6.0, "right": 1.0}, {"length": 400.0, "right": None}]
    totals = [writer._total(part, answer) for part, answer in zip(parts, ANSWERS, strict=True)]
    assert totals == [0.5 * 6 + 10 * 1, 0.5 * 400]
    transcripts = [Transcript(answer.token_ids, [(1, len(answer.token_ids))]) for answer in ANSWERS]
    found = Written(list(ANSWERS), transcripts, [True, True], totals, parts, [[0.0], [0.0]]).metrics()
    assert (found["reward_of_length"], found["reward_of_right"], found["reward"]) == (203.0, 1.0, (13 + 200) / 2)
    assert found["missing_of_right"] == 0.5 and "missing_of_length" not in found
    alone = replace(writer, rewards={"right": (1.0, right)})
    with pytest.raises(TrainingError, match=r"right gave None for the answer ' x x"):
        alone._total({"right": None}, ANSWERS[1])
    assert math.isnan(replace(alone, may_miss=True)._total({"right": None}, ANSWERS[1]))


def test_a_program_has_neither_network_nor_files(opened: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        reward = opened(
            "import socket\n"
            "def reward(prompt, completion, **fields):\n"
            "    found = 0\n"
            "    try:\n"
            f"        socket.create_connection(('127.0.0.1', {port}), 1).close()\n"
            "        found += 1\n"
            "    except OSError:\n"
            "        pass\n"
            "    try:\n"
            f"        open({str(tmp_path / 'written')!r}, 'wb', buffering=0).write(b'x')\n"
            "        found += 2\n"
            "    except OSError:\n"
            "        pass\n"
            "    return found\n"
        )
        (found, _) = reward(ANSWERS)
    if found == 1:  # only the network was there
        pytest.skip("this system lets no process leave the network")
    assert found == 0
    assert not (tmp_path / "written").exists() or not (tmp_path / "written").read_text()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def judge(prompt, completion): return 1\n", r"defines no function reward"),
        ("def reward(:\n", r"SyntaxError"),
        ("http://user:word@127.0.0.1/judge", "is no address of a server"),
        (
            "http://127.0.0.1:9/judge",
            r"cannot be judged: http://127\.0\.0\.1:9/judge cannot be reached: Connection",
        ),
    ],
)
def test_what_cannot_judge_is_refused_before_a_run_begins(opened: Any, source: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        opened(source)


class Service(BaseHTTPRequestHandler):
    """Judges by the length of answers, or replies with what `reply` says."""

    reply: bytes | None = None
    failures = 0
    may_answer: threading.Event
    asked: dict[str, Any]

    def do_POST(self) -> None:
        asked = type(self).asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.may_answer.wait(60)
        found = json.dumps({"rewards": [len(answer["completion"]) for answer in asked["answers"]]}).encode()
        self.send_response(503 if self.failures else 200)
        type(self).failures = max(0, self.failures - 1)
        self.end_headers()
        self.wfile.write(found if self.reply is None or not asked["answers"] else self.reply)

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between attempts, which take no time here."""
    found: list[float] = []
    monkeypatch.setattr("sheepop.core.http_client.sleep", found.append)
    return found


@pytest.fixture
def service() -> Iterator[tuple[type[Service], str]]:
    handler = type("Handler", (Service,), {"may_answer": threading.Event()})
    handler.may_answer.set()
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield handler, f"http://127.0.0.1:{server.server_port}/judge"
        handler.may_answer.set()
        server.shutdown()
        thread.join()


def test_a_service_is_asked_over_http(opened: Any, service: tuple[type[Service], str]) -> None:
    assert opened(service[1])([*ANSWERS, CHAT]) == [6.0, 400.0, 6.0]
    plain, _, chat = service[0].asked["answers"]
    assert plain == {"prompt": "one plus two", "completion": " three", "fields": {"answer": "three"}}
    assert chat["messages"] == {"prompt": ASKED, "completion": SAID}


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (b"<html>", r'did not answer with a JSON object \(5 attempts\)\. Give .* replies \{"rewards"'),
        (b"[1, 2]", "did not answer with a JSON object"),
        (b'{"reward": [1, 2]}', r'did not reply with an object \{"rewards"'),
        (b'{"rewards": [1]}', "gave 1 rewards for 2 answers"),
        (b'{"rewards": [1, NaN]}', "gave nan for the answer ' x x"),
        (b'{"rewards": [true, "2"]}', "gave '2' for the answer"),
    ],
)
def test_a_service_that_replies_wrongly_is_named(
    opened: Any, service: tuple[type[Service], str], waits: list[float], reply: bytes, problem: str
) -> None:
    reward = opened(service[1])
    service[0].reply = reply
    with pytest.raises(TrainingError, match=problem):
        reward(ANSWERS)


def test_a_service_that_is_busy_is_asked_again_and_named_when_it_stays_so(
    opened: Any, service: tuple[type[Service], str], waits: list[float]
) -> None:
    reward = opened(service[1])
    service[0].failures = 2
    assert reward(ANSWERS) == [6.0, 400.0]
    assert waits == [1.0, 2.0]
    service[0].failures = 99
    with pytest.raises(TrainingError, match=r"cannot be judged: .*/judge answered 503: .* \(5 attempts\)"):
        reward(ANSWERS)


def test_a_service_that_hangs_is_given_up_after_its_time(
    opened: Any, service: tuple[type[Service], str], waits: list[float]
) -> None:
    strict, lenient = opened(service[1]), opened(service[1], may_fail=True)
    strict._seconds = lenient._seconds = 0.05  # less than a busy machine may need to open them
    service[0].may_answer.clear()
    with pytest.raises(TrainingError, match=r"cannot be judged: .*/judge does not answer in time"):
        strict(ANSWERS)
    assert len(waits) == 4
    assert lenient(ANSWERS) == [None, None]


def test_a_service_that_is_busy_before_a_run_begins_is_refused_at_once(
    opened: Any, service: tuple[type[Service], str], waits: list[float]
) -> None:
    service[0].failures = 1
    with pytest.raises(ConfigError, match="answered 503"):
        opened(service[1])
    assert waits == []
