"""Explains the terms on screen and on the pages in a sentence or two for beginners."""

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
        "The length of the gradient over all weights. A sudden jump is a sign of trouble; a gradient with a norm above "
        "the limit is scaled down."
    ),
    "Step": "One update of all weights, made from one batch of text.",
    "Epoch": "One pass over all of the training text.",
    "Checkpoint": "The whole state of a run on disk: the run can resume from it, and its model can write text.",
    "MFU": (
        "Model FLOPs utilisation: the share of the machine's highest speed in matrix products that training reaches. "
        "The rest goes to memory access, other operations, and waiting."
    ),
    "Tokens per second": "How many tokens training processes in a second.",
    "Temperature": "How random sampling is: below 1 the likely tokens become likelier, above 1 the unlikely ones do.",
    "Top-k": "Only the k likeliest tokens can be sampled.",
    "Top-p": "Only the likeliest tokens that together reach the probability p can be sampled.",
    "Embedding": "The list of numbers that represents a token in the model. Tokens with similar use get similar lists.",
    "Attention": "The part of a block in which each token takes information from the tokens before it.",
    "Head": "One of several attentions that work in parallel, each with its own queries, keys and values.",
    "Query": "A list of numbers that a token compares with the keys of the tokens before it.",
    "Key": "A list of numbers of a token: the better it fits a query, the more attention the token gets.",
    "Value": "The list of numbers that a token passes to the tokens that attend to it.",
    "Softmax": "Turns any numbers into positive ones that sum to 1; the largest number gets the largest share.",
    "Logit": "The score of a token before the softmax turns it into a probability.",
    "Residual stream": "The list of numbers for each token that passes through all blocks. Each block adds to it.",
    "Feed-forward network": "The part of a block that processes each token alone, with an activation inside.",
    "Activation": "The nonlinear function between two matrix products, which would otherwise be equal to a single one.",
    "Block": "One layer of the model: attention, then a feed-forward network. A model is a stack of them.",
    "KV cache": "The keys and values of all tokens so far, kept so that the next one need not compute them again.",
    "Expert": "One of several feed-forward networks of a block, of which a router chooses a few for each token.",
    "Norm": "Scales the numbers of a token to a fixed size before a block uses them.",
    "Nats": "A measure of surprise with natural logarithms; one nat is 1.44 bits.",
    "Calibration error": (
        "How far the probabilities of a model are from how often it is right: how over- or underconfident it is."
    ),
    "Contamination": "Test questions that were in the training text, so that the model may know them by heart.",
    "95 % interval": "It contains the true value in 95 of 100 repetitions with other items of the same kind.",
    "p value": "The probability that chance alone makes a difference this large between two equally good models.",
    "Preference": "Two answers to one prompt, and which of them somebody preferred.",
}


def meaning(label: str) -> str | None:
    """The meaning of `label`, or of the term that it begins with; None if the glossary has neither."""
    by_beginning = (text for term, text in GLOSSARY.items() if label.startswith(term))
    return GLOSSARY.get(label) or next(by_beginning, None)
