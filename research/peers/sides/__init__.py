"""What is timed beside the program, each a script of its own that takes one JSON argument and ends with one line of JSON."""


def token_ids(tokens: int, vocabulary: int) -> list[int]:
    """What the example `prefill` of the teacher feeds it."""
    return [i * 2_654_435_761 % 2**32 % vocabulary for i in range(tokens)]
