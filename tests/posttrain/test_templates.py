"""Ready chat templates write what the published ones of their formats write, and mark the answers with their ends."""

from __future__ import annotations

import pytest

from sheepop.core.errors import TokenizerError
from sheepop.posttrain.encoding import ExampleEncoder
from sheepop.tokenizer import ByteLevelBPE, ChatTemplate
from sheepop.tokenizer.ready_templates import READY, fitting, named_template

from .test_encoding import learnt
from .test_turns import TWO, _rendered

SYSTEM = {"role": "system", "content": "Be brief."}
# As the documentation of each model family shows them.
WRITTEN = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    "Hi there!<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\nHi there!<end_of_turn>\n"
    "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHi there!<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
}
TEXTS = ["user assistant\n some text and more of it\n\n"] * 9


@pytest.mark.parametrize("name", WRITTEN)
def test_a_ready_template_writes_the_published_format(name: str) -> None:
    special = [token for token in READY[name].tokens if token != "<bos>"]  # which every tokenizer has
    tokenizer = ByteLevelBPE.train(TEXTS, 270 + len(special), special)
    assert fitting(tokenizer) == [name]
    with ChatTemplate(named_template(name, tokenizer), {"eos_token": "<eos>"}) as template:
        template._ask = _rendered  # type: ignore[method-assign]
        assert template.render([SYSTEM, *TWO[:3]], add_generation_prompt=True) == WRITTEN[name]
        encode = ExampleEncoder(tokenizer, template)
        (found,) = encode.conversation([SYSTEM, *TWO])
    end = READY[name].end
    assert learnt(found, tokenizer) == [f"Hi there!{end}", f"It is 4.{end}"]
    assert encode.end_ids == [tokenizer.special_tokens[end]]


def test_a_template_whose_tokens_a_model_lacks_is_refused_with_those_that_fit() -> None:
    tokenizer = ByteLevelBPE.train(TEXTS, 272, ["<|im_start|>", "<|im_end|>"])
    with pytest.raises(TokenizerError, match=r"gemma needs the special token <start_of_turn>.* It has those of chatml"):
        named_template("gemma", tokenizer)
