"""The text of tokens that are generated one by one."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from .tokenizer import Tokenizer


def text_pieces(tokenizer: Tokenizer, tokens: Iterable[int], *, before: Sequence[int] | np.ndarray = ()) -> Iterator[str]:
    """Decodes tokens as they come.

    What a token adds to a text depends on the tokens before it (a space, a part of a character), so each is decoded with some
    of them. Incomplete UTF-8 is buffered until the character is complete, or the tokens end.

    Args:
        tokenizer: the tokenizer.
        tokens: the token ids.
        before: the ids of the prompt, whose text is left out.

    Yields:
        Pieces of text, none empty.
    """
    ids = [int(i) for i in before]
    context, done = 0, len(ids)  # ids[context:done] are decoded again, as the context of new tokens

    def new_text() -> str:
        return tokenizer.decode(ids[context:])[len(tokenizer.decode(ids[context:done])) :]

    for token in tokens:
        ids.append(token)
        text = new_text()
        if text and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            context, done = done, len(ids)
            yield text
    if rest := new_text():
        yield rest
