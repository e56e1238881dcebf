"""What the words on screen and on the pages mean, each in a sentence or two for somebody who meets it first."""

from __future__ import annotations

GLOSSARY = {
    "Token": "A piece of text that the model reads and writes as one: a word, a part of one, or a single character.",
    "Vocabulary": "All tokens that the model knows. With more of them texts are shorter, and there is more to learn.",
    "Parameters": "The numbers that training changes, also called weights. More hold more, and take longer to train.",
    "Context (tokens)": "How many tokens the model looks back on when it predicts the next one.",
    "Loss (nats per token)": (
        "How surprised the model is by the next token: minus the natural logarithm of the probability that it gave it, "
        "on average. Lower is better; guessing evenly among V tokens gives ln V."
    ),
    "Perplexity": (
        "e to the loss: among how many equally likely tokens the model would seem to choose. It depends on the "
        "vocabulary, so only models with the same one can be compared by it."
    ),
    "Bits per byte": (
        "How many bits a byte of text would take, were it compressed by the model's predictions. Lower is better. It "
        "does not depend on the vocabulary, so all models and compressors can be compared by it."
    ),
    "Next-token accuracy": "How often the token that the model holds for the likeliest is the one that follows.",
    "Held-out text": "Text that the model is never trained on. How well it predicts that is what it has understood.",
    "Learning rate": "How far one step moves the weights. It rises at first, then falls, so that steps become finer.",
    "Gradient norm": (
        "How strongly the weights are pulled in a step, all together. A sudden jump is a sign of trouble; what exceeds "
        "a limit is scaled down."
    ),
    "Step": "One change of all weights, made from one batch of text.",
    "Epoch": "One pass over all of the training text.",
    "Checkpoint": "The whole state of a run on disk, from which it can go on or write.",
    "MFU": (
        "Model FLOPs utilisation: the share of the machine's highest speed in matrix products that training reaches. "
        "The rest goes into memory, other operations, and waiting."
    ),
    "Tokens per second": "How much text training gets through in a second.",
    "Temperature": "How boldly the model writes: below 1 it keeps to what is likely, above 1 it dares more.",
}


def meaning(label: str) -> str | None:
    """What `label` means, or what the term that it begins with means; None for a word that explains itself."""
    found = GLOSSARY.get(label)
    if found is None:
        found = next((text for term, text in GLOSSARY.items() if label.startswith(term)), None)
    return found
