"""The merged metrics of several replicas."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from sheepop.serve.metrics import merged

FRONT = b"""# TYPE sheepop_requests_total counter
sheepop_requests_total{path="/v1/completions",status="200"} 5.0
# TYPE sheepop_completion_tokens_total counter
"""
REPLICA = """# TYPE sheepop_requests_total counter
sheepop_requests_total{{path="/v1/completions",status="200"}} 2.0
# TYPE sheepop_completion_tokens_total counter
sheepop_completion_tokens_total{{model="m"}} {tokens}
"""


def test_requests_are_those_of_the_front_and_tokens_those_of_each_replica():
    text = merged(FRONT, {"0": REPLICA.format(tokens=30).encode(), "1": REPLICA.format(tokens=12).encode()})
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert found == {
        ("sheepop_requests_total", "/v1/completions", "200"): 5,
        ("sheepop_completion_tokens_total", "m", "0"): 30,
        ("sheepop_completion_tokens_total", "m", "1"): 12,
        ("sheepop_replicas",): 2,
    }
