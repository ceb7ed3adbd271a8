"""What a store says is printed without secrets, wherever they are from."""

import html
import json
from urllib.parse import quote

import pytest

from torchmars.core.errors import say_error
from torchmars.core.secrets import FILES, has_credentials, without_credentials, without_secrets

# Values that are in no place but those of a test, which nothing but their place tells to be secret.
WORDS = [f"word-{number}/of+nobody" for number in range(9)]


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Secrets in variables and in files of stores' own tools."""
    home = tmp_path / "home"
    (home / ".aws").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for name in FILES:
        monkeypatch.delenv(name, raising=False)
    (home / ".aws" / "credentials").write_text(
        f"[default]\naws_access_key_id = {WORDS[0]}\naws_secret_access_key={WORDS[1]}\n"
        f"[other]\naws_session_token = {WORDS[2]}\nregion = us-east-1\n"
    )
    google = {"type": "service_account", "private_key": f"-----BEGIN\n{WORDS[3]}\n{WORDS[4]}\n"}
    (tmp_path / "google.json").write_text(json.dumps(google | {"client_secret": WORDS[5]}))
    (tmp_path / "token").write_text(WORDS[6])
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "google.json"))
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    azure = f"AccountName=mine;AccountKey={WORDS[7]};EndpointSuffix=core.windows.net"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=2024&sig={WORDS[8]}")


@pytest.mark.parametrize("written", [str, html.escape, lambda text: quote(text, safe="")])
def test_secrets_of_variables_and_files(places, written):
    for word in WORDS:
        said = without_secrets(f"<Error>no: {written(word)}</Error> in us-east-1")
        assert said == "<Error>no: ...</Error> in us-east-1"


@pytest.mark.parametrize(
    "text",
    [
        "<AWSAccessKeyId>SECRET</AWSAccessKeyId>",
        "<SignatureProvided>SECRET+x/y=</SignatureProvided>",
        "X-Amz-Security-Token: SECRET",
        "Signature=SECRET, no",
        "Could not connect to http://127.0.0.1:9/b?X-Amz-Credential=SECRET%2Fus&X-Amz-Date=1",
        "ASIASECRET123 is not known",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYSECRETKEY1 does not match",
        "eyJhbGciOi.SECRET.x is no token",
        "ya29.SECRET-x was refused",
        "http://me:SECRET@proxy:80/ cannot be reached",
    ],
)
def test_what_looks_like_a_secret(text):
    """As a role's credentials, which are in no file."""
    said = without_secrets(text)
    assert "SECRET" not in said and "..." in said


@pytest.mark.parametrize(
    "text",
    [
        "The specified bucket does not exist",
        'Could not connect to the endpoint URL: "http://127.0.0.1:9000/bucket/run"',
        "abfs://logs@mine.dfs.core.windows.net/run is no name",
        "The AWS Access Key Id you provided does not exist in our records.",
        "did you mean --times? 12:30:00 step-00000100/__0_0.distcp",
    ],
)
def test_what_is_no_secret_stays(text):
    assert without_secrets(text) == text


def test_an_error_never_has_credentials(capsys):
    for name in ("s3://K:SECRET@b", "s3:K:A/SECRET@b", "https://h/x?sig=SECRET", "s3//K:SECRET@b"):
        say_error(f"cannot read the argument {name!r}: see --help")
        assert "SECRET" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "See https://medium.com/@user",
        "http://user: hello",
        "s3://bucket/run@2024",
        "https://hf.co/a/b@main is a revision",
    ],
)
def test_names_and_texts_with_such_letters_are_no_credentials(text):
    assert not has_credentials(text) and without_credentials(text) == text


@pytest.mark.parametrize("name", ["s3://AKIAIOSFODNN7EXAMPLE/x@bucket", "http://user:word@host/x"])
def test_these_are(name):
    assert has_credentials(name) and name not in without_credentials(name)
