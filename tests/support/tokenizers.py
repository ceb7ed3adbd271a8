"""Tokenizers of other people's kinds, and a folder of transformers with one: all small."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ("The", "cat", "sat", "on", "fox")


def llama_2(template="<s> $A"):
    """Blanks are a letter, one is put before a text, and unknown letters are bytes."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "<turn>": 3}
    for each in (*(f"<0x{byte:02X}>" for byte in range(256)), *"▁Thecatsonfx"):
        vocabulary.setdefault(each, len(vocabulary))
    merges = []
    for word in WORDS:
        for end in range(len(word)):
            pair = f"▁{word[:end]}", word[end]
            if "".join(pair) not in vocabulary:
                vocabulary["".join(pair)] = len(vocabulary)
                merges.append(pair)
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    found = Tokenizer(model)
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    found.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    names = [name for name in ("<s>", "</s>") if name in template]
    found.post_processor = processors.TemplateProcessing(
        single=template, pair=None, special_tokens=[(name, vocabulary[name]) for name in names]
    )
    found.add_special_tokens(["<unk>", "<s>", "</s>"])
    return found


def metaspace():
    """As Mixtral's and T5's: the decoder drops the blank that the first token has."""
    pieces = [f"▁{word}" for word in WORDS] + list("▁Thecatsonfx")
    scores = [("</s>", 0.0), ("<unk>", 0.0), *((piece, -len(pieces)) for piece in pieces)]
    found = Tokenizer(models.Unigram(scores, unk_id=1))
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    found.decoder = decoders.Metaspace()
    found.add_special_tokens(["</s>"])
    return found


def word_piece():
    """As BERT's: lower case, no accents, and nothing of words that are not known."""
    names = ["[UNK]", "[EOS]", "the", "cat", "fox", "##es", "on", ".", "'"]
    found = Tokenizer(
        models.WordPiece({name: id for id, name in enumerate(names)}, unk_token="[UNK]")
    )
    found.normalizer = normalizers.BertNormalizer(lowercase=True)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece()
    found.add_special_tokens(["[UNK]", "[EOS]"])
    return found


def word_ends():
    """As OpenAI's first GPT: the last letter of a word has a mark, which decodes to a blank."""
    names = ["<unk>", "</s>", *"Thecatsonfx", *(f"{letter}</w>" for letter in "Thecatsonfx")]
    model = models.BPE(
        {name: id for id, name in enumerate(names)},
        [],
        unk_token="<unk>",
        end_of_word_suffix="</w>",
    )
    found = Tokenizer(model)
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found.decoder = decoders.BPEDecoder("</w>")
    found.add_special_tokens(["<unk>", "</s>"])
    return found


def byte_level():
    """As GPT-2's."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: id for id, letter in enumerate([*letters, "<|endoftext|>"])}
    found = Tokenizer(models.BPE(vocabulary, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["<|endoftext|>"])
    return found


KINDS = {
    "Llama 2": llama_2,
    "Metaspace": metaspace,
    "WordPiece": word_piece,
    "word ends": word_ends,
    "byte level": byte_level,
}


def write_tokenizer(folder: Path, template: str = "<s> $A", **named: str | None) -> Any:
    """Write a tokenizer as transformers does, and return it as transformers reads it."""
    import transformers

    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | named
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=llama_2(template), **names)
    tokenizer.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def write_llama(folder: Path) -> None:
    """Write a Llama with random weights, and a tokenizer that begins texts by a token."""
    import torch
    import transformers

    tokenizer = write_tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def letters(letter_id=ord, special="<|endoftext|>"):
    """Return a tokenizer of Hugging Face with a token for each letter, and a special one."""
    vocabulary = {chr(code): letter_id(chr(code)) for code in range(32, 127)}
    last = max(vocabulary.values()) + 1
    model = models.WordLevel({"?": 0} | vocabulary | {special: last}, unk_token="?")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([special])
    return tokenizer


def tokenizer_file(folder, **options):
    """Write the file of such a tokenizer into a folder; return its path."""
    folder.mkdir(exist_ok=True)
    file = folder / "tokenizer.json"
    tokenizer = letters(**options)
    tokenizer.enable_truncation(3)  # what a file says of batches is not for corpora
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(file))
    return file
