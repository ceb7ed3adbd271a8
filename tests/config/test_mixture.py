"""[data] and its mixtures: what they resolve to, and one clear line for each mistake."""

import pytest

from tests.support.tiny import write_config
from torchmars.config.load import load_config
from torchmars.core.errors import UserError


def load(tmp_path, toml):
    file = tmp_path / "config.toml"
    file.write_text(toml)
    return load_config([str(file)], "test")


MIXTURE = """
[data]
tokenizer = "a/folder/tokenizer.json"
[[data.mixture]]
source = "nanogpt:/data/owt"
weight = 3
[[data.mixture]]
name = "books"
source = "text"
files = ["a.txt"]
weight = 1.5
path = "elsewhere"
"""


def test_a_mixture_reads_back_the_same_and_has_a_folder_for_each_part(tmp_path):
    config = load(tmp_path, MIXTURE)
    write_config(config, tmp_path / "resolved.toml")
    assert load_config([str(tmp_path / "resolved.toml")], "test") == config
    first, second = config.data.corpora()
    assert (first.source, first.path) == (
        "nanogpt:/data/owt",
        "data/nanogpt-data-owt-a-folder",
    )
    assert (second.files, second.path, second.mixture) == (["a.txt"], "elsewhere", [])
    assert load_config([], "test").data.corpora() == [load_config([], "test").data]


@pytest.mark.parametrize(
    "toml,message",
    [
        ('[data]\nsource = "text"\n' + MIXTURE.replace("[data]", ""), "beside .*data.mixture"),
        (MIXTURE + '[[data.mixture]]\nname = "books"\nsource = "stdlib"\nweight = 1', "'books'"),
        (MIXTURE.replace("1.5", "0").replace("= 3", "= 0"), "every weight is 0: raise one"),
        (
            MIXTURE.replace("1.5", "-1"),
            "data.mixture.weight must be greater than or equal to 0, got -1",
        ),
        (MIXTURE.replace("weight = 3", ""), "data.mixture.weight is missing"),
        (
            MIXTURE.replace("nanogpt:/", "nanogtp:/"),
            "data.mixture, 'nanogtp:/data/owt': data.source .* did you mean nanogpt",
        ),
        (
            MIXTURE.replace('files = ["a.txt"]', "").replace('path = "elsewhere"', ""),
            "'books': data.files is empty",
        ),
        ('[data]\nsource = "llmc:"', "names no files: write llmc:PATH"),
        ('[data]\nsource = "llmc:x"\nfiles = ["y"]', "data.files has no meaning"),
        ('[data]\nsource = "web"', "is of no known kind: .* one of stdlib, text, .* nanogpt"),
    ],
)
def test_mistakes_in_a_mixture_and_in_a_source_are_one_line(tmp_path, toml, message):
    with pytest.raises(UserError, match=message) as mistake:
        load(tmp_path, toml)
    assert "\n" not in str(mistake.value)
