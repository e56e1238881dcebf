"""What the words on screen and on the pages mean, each in a sentence or two for somebody who meets it first."""

from __future__ import annotations

GLOSSARY = {
    "Token": "A piece of text that the model reads and writes as one: a word, a part of one, or a single character.",
    "Vocabulary": "All tokens that the model knows. With more of them texts get shorter, but there is more to learn.",
    "Parameters": (
        "The numbers that training changes, also called weights. A model with more of them can learn more, but takes "
        "longer to train."
    ),
    "Context (tokens)": "How many tokens the model looks back at when it predicts the next one.",
    "Loss (nats per token)": (
        "How surprised the model is by the next token: minus the natural logarithm of the probability it gave that "
        "token, on average. Lower is better; guessing evenly among V tokens gives ln V."
    ),
    "Perplexity": (
        "e to the power of the loss: how many equally likely tokens the model seems to choose from. It depends on the "
        "vocabulary, so it compares only models with the same one."
    ),
    "Bits per byte": (
        "How many bits each byte of text would take if it were compressed with the model's predictions. Lower is "
        "better. It does not depend on the vocabulary, so it compares any models and compressors."
    ),
    "Next-token accuracy": "How often the token that the model finds likeliest is the one that follows.",
    "Held-out text": "Text that the model is never trained on. How well it predicts this text shows what it learned.",
    "Learning rate": "How far one step moves the weights. It rises at first, then falls, so that steps become finer.",
    "Gradient norm": (
        "How strongly one step pulls on all weights together. A sudden jump is a sign of trouble; a norm above the "
        "limit is scaled down."
    ),
    "Step": "One update of all weights, made from one batch of text.",
    "Epoch": "One pass over all of the training text.",
    "Checkpoint": "The whole state of a run on disk: the run can resume from it, and its model can write text.",
    "MFU": (
        "Model FLOPs utilisation: the share of the machine's highest speed in matrix products that training reaches. "
        "The rest goes to memory access, other operations, and waiting."
    ),
    "Tokens per second": "How much text training gets through in a second.",
    "Temperature": "How boldly the model writes: below 1 it keeps to what is likely, above 1 it dares more.",
    "Top-k": "Only the k likeliest tokens can be drawn; all others are cut.",
    "Top-p": "Only the likeliest tokens that together reach the probability p can be drawn; all others are cut.",
    "Embedding": "The list of numbers that stands for a token inside the model. Tokens used alike get lists alike.",
    "Attention": "The part of a block in which each token looks at those before it and takes from them what it needs.",
    "Head": "One of several attentions that work side by side, each with a view of its own.",
    "Query": "What a token asks of the tokens before it: a list of numbers to be compared with their keys.",
    "Key": "What a token offers to be found by: the better it fits a query, the more that token is looked at.",
    "Value": "What a token hands over to those that look at it.",
    "Softmax": "Turns any numbers into positive ones that sum to 1; the largest gets the most.",
    "Logit": "The score of a token before the softmax makes a probability of it.",
    "Residual stream": "What passes through all blocks, a list of numbers for each token. Each block adds to it.",
    "Feed-forward network": "The part of a block that works on each token alone: wider, an activation, and back.",
    "Activation": "The bend between two matrix products, without which they would be no more than one.",
    "Block": "One layer of the model: attention, then a feed-forward network. A model is a stack of them.",
    "KV cache": "The keys and values of all tokens so far, kept so that the next one need not compute them again.",
    "Expert": "One of several feed-forward networks of a block, of which a router chooses a few for each token.",
    "Norm": "Brings the numbers of a token to a fixed size before a block works on them.",
    "Nats": "A measure of surprise with natural logarithms; one nat is 1.44 bits.",
    "Calibration error": (
        "By how much a model is too sure or not sure enough: how far its probabilities are from how often it is right."
    ),
    "Contamination": "Questions of a test that the model read in training, which it may know by heart.",
    "95 % interval": "The true value lies in it in 95 of 100 repetitions with other items of the same kind.",
    "p value": "How likely chance alone makes a difference as large between two models that are equally good.",
    "Preference": "Two answers to one prompt, and which of them somebody liked better.",
}


def meaning(label: str) -> str | None:
    """What `label` means, or what the term that it begins with means; None for a word that explains itself."""
    found = GLOSSARY.get(label)
    if found is None:
        found = next((text for term, text in GLOSSARY.items() if label.startswith(term)), None)
    return found
