"""Tokenizers of folders of Hugging Face's transformers: those that are read, and files to write."""

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torchmars.core.errors import needs_package
from torchmars.data.tokenizer import ENDS_OF_TEXT, FileTokenizer, TiktokenTokenizer, Tokenizer

if TYPE_CHECKING:
    import tokenizers


class FolderTokenizer(FileTokenizer):
    """A tokenizer.json in the folder of its model, with the tokens around texts that it has seen.

    A model of other people has seen what the file's post-processor adds, where one of ours has seen
    the end of the document before. It ends what it writes by any of several tokens.
    """

    @property
    def before(self) -> list[int]:
        """The tokens that the post-processor puts before a text."""
        return self.put_before

    @cached_property
    def begin(self) -> int:
        """The token that begins a text or else the one that ends it, as EleutherAI's harness."""
        named = self.named("bos_token")
        number = None if named is None else self.number(named)
        return self.end_of_text if number is None else number

    @cached_property
    def ends(self) -> list[int]:
        """What generation_config.json names, or else config.json, or else the tokenizer."""
        return self.ends_of_model or [self.end_of_text]


def tokenizer_files(tokenizer: Tokenizer, seq_len: int) -> dict[str, str]:
    """Return the texts of the files that AutoTokenizer loads for sequences of `seq_len`, by name.

    Settings beside a tokenizer.json are kept, but not those that name code or a token that there is
    not. Raises `UserError` if the package that writes the files is missing.
    """
    kept: dict[str, Any] = {}
    if isinstance(tokenizer, FileTokenizer):
        text, built = tokenizer.content.decode(), tokenizer.package_tokenizer
        kept = {key: value for key, value in tokenizer.settings.items() if key != "auto_map"}
    else:
        built = byte_pair_tokenizer(*byte_pairs(tokenizer))
        text = built.to_str(pretty=True)
    config = {
        "clean_up_tokenization_spaces": False,
        **kept,
        **{
            name: None if number is None else built.id_to_token(number)
            for name, number in special_tokens(tokenizer).items()
        },
        "tokenizer_class": "PreTrainedTokenizerFast",  # of tokenizer.json alone, and no code
        "model_max_length": seq_len,
    }
    begin = tokenizer.begin_token
    if begin is not None and tokenizer.put_before != [begin]:
        text = begun(text, str(built.id_to_token(begin)), begin)
    return {"tokenizer.json": text, "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}


def special_tokens(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the ids of the tokens with a part of their own, by their names in transformers.

    One that the tokenizer does not name is the token that ends a text.
    """
    end = tokenizer.end_of_text
    found: dict[str, int | None] = dict.fromkeys(("bos_token", "eos_token", "pad_token"), end)
    if isinstance(tokenizer, FileTokenizer):
        found["bos_token"] = [*tokenizer.put_before, end][0]
        for name in tokenizer.settings.keys() & {"bos_token", "pad_token"}:
            token = tokenizer.named(name)
            number = None if token is None else tokenizer.number(token)
            if token is None or number is not None:
                found[name] = number
    if tokenizer.begin_token is not None:
        found["bos_token"] = tokenizer.begin_token
    return found


def begun(text: str, token: str, begin: int) -> str:
    """Return the text of a tokenizer.json that puts a token, of id `begin`, alone before texts."""
    # As the file has it: the package's constructor takes colons and dollars of a token for its own.
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
    template = {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": {token: {"id": token, "ids": [begin], "tokens": [token]}},
    }
    return json.dumps(json.loads(text) | {"post_processor": template}, indent=2, ensure_ascii=False)


def byte_pairs(tokenizer: Tokenizer) -> tuple[dict[bytes, int], str | None, dict[str, int]]:
    """Return what `byte_pair_tokenizer` makes a tokenizer of bytes or of tiktoken from."""
    if isinstance(tokenizer, TiktokenTokenizer):
        found = tokenizer.encoding  # these private parts had the same names since its first version
        return found._mergeable_ranks, found._pat_str, found._special_tokens
    ranks = {bytes([byte]): byte for byte in range(256)}  # nothing is merged, or encoded apart
    return ranks, None, {ENDS_OF_TEXT[0]: tokenizer.end_of_text}


def byte_pair_tokenizer(
    ranks: dict[bytes, int], pattern: str | None, special: dict[str, int]
) -> "tokenizers.Tokenizer":
    """Return a byte-pair encoding, of whose tokens those of lower `ranks` are merged first.

    `pattern` cuts a text into pieces that are encoded apart; None: none are.
    """
    with needs_package("tokenizers", "writing a tokenizer"):
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # A byte that can be printed has its own letter. The others, in order, have those above.
    others = iter(letter for letter in letters if ord(letter) > 255)
    of_bytes = [chr(byte) if chr(byte) in letters else next(others) for byte in range(256)]

    def word(token: bytes) -> str:
        return "".join(of_bytes[byte] for byte in token)

    # Special tokens too: others would get the next free numbers.
    vocabulary = {word(token): rank for token, rank in ranks.items()} | special
    # Any two neighbours that are a token together are merged to it, the lowest rank first.
    pairs = [
        (word(token[:cut]), word(token[cut:]))
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    # As tiktoken does, a piece that is a token is not put together from its bytes.
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pattern is None:
        tokenizer.pre_tokenizer = to_bytes
    else:
        # There "{1,3}+" repeats once more. tiktoken means "and give back none", and has it only
        # where no more follows.
        pieces = pre_tokenizers.Split(Regex(pattern.replace("}+", "}")), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer
