"""Keeps secrets out of configs and messages, and compares them in constant time. Their sources are
in docs/security.md.
"""

from __future__ import annotations

import base64
import hmac
import html
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

_USER = re.compile(r"(?<=://)[^/\s@'\"]+@")
_IN_URL = re.compile(r"https?://[^/\s@]+@|[a-z][a-z0-9+.-]{0,20}://[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)
_QUERY = re.compile(r"[?&]([^=&?]+)=[^&]")
# Patterns of the names of secrets, in lower case with underscores between words. Those of the last
# table count only for environment variables: in fields they are words of data and models
# (eos_token, answer_key, pass).
_WHOSE = (
    "access|admin|auth|bearer|session|tracking|refresh|hf|hub|github|gitlab|openai|anthropic|api|secret|"
    "security|private|service"
)
_SECRET = (
    "[a-z0-9]*(secret|password|passwd|passphrase|credential)s?|passcode|authorization|cookie|auth_string|"
    "connection_string|access_key_id"
    rf"|secret_access_key|id_token|(encryption|signing)_key|({_WHOSE})_?(token|key)s?"
)
_SECRET_IN_VARIABLE = (
    "[a-z0-9]*token|[a-z0-9]*auth|key|keys|pass|(db|my|pg|user|root)pass|pgpassfile|pw|pwd|creds?|cookies|bearer|"
    "jwt|pat|sas|dsn|webhook"
)
_FIELD = re.compile(rf"(.*_)?({_SECRET})\d*|token|(.*_)?db_?pass|.+_pwd")
_VARIABLE = re.compile(rf"(.*_)?({_SECRET}|{_SECRET_IN_VARIABLE})_?\d*(?P<of>_.*)?")
# not secrets: SGLANG_INIT_NEW_TOKEN_RATIO=0.7, PASS_AT_K=8
_NUMBER = re.compile(r"[-+]?(\d{1,9}|\d{0,9}\.\d{1,9})")
# arguments of rewards that name an environment variable, with what is before its name
_NAMING = {"key_env": "", "url": "$"}
SECRET_CHARS_MIN = 4  # shorter ones occur in every text
# fragments of a key of this length are hidden, as a service may echo a part of it
FRAGMENT_CHARS = 8
HIDDEN = "***"
_LOWER = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
_SWITCHES = {"", "0", "1", "true", "false"}  # HF_HUB_DISABLE_IMPLICIT_TOKEN=1
_QUERY_NAME = re.compile(r"key|sig|signature|x_amz_signature|x_amz_security_token|auth", re.IGNORECASE)


def key_fits(authorization: str, key: str) -> bool:
    """True when an Authorization header has the key, or no key is required (empty). Takes constant
    time.
    """
    # headers are decoded so; bytes that are not UTF-8 are simply wrong
    given = authorization.encode(errors="surrogateescape")
    return not key or hmac.compare_digest(given, f"Bearer {key}".encode())


def with_password_aside(uri: str) -> str:
    """MLflow's http URI without user and password, which are put into the environment, as MLflow
    prints the URI when a run ends.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.username:
        return uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    return without_passwords(uri)


def without_passwords(text: str) -> str:
    """The text without user and password (the part before the @) in its URLs."""
    return _USER.sub("", text)


class Mask:
    """Hides in a text secrets that a service may echo: any FRAGMENT_CHARS consecutive characters of
    the `keys`, and the `places` as a whole.

    Also in their forms in URLs, HTML, JSON (escaped any number of times), hex and base64, in upper
    or lower case.

    Example: Mask(["sk-4711-4711"], ["/hook/x"])("GET /hook/x: no sk-4711-...") == "GET ***: no
    ***..."
    """

    def __init__(self, keys: Iterable[str], places: Iterable[str]) -> None:
        self._hidden = defaultdict[int, set[str]](set)  # by number of characters
        for secrets, chars_max in ((keys, FRAGMENT_CHARS), (places, None)):
            for form in (form for secret in secrets if len(secret) >= SECRET_CHARS_MIN for form in _forms(secret)):
                size = min(len(form), chars_max or len(form))
                self._hidden[size] |= {form[start : start + size] for start in range(len(form) - size + 1)}

    def __call__(self, text: str) -> str:
        places = [place for place, letter in enumerate(text) if letter != "\\"]
        plain = "".join(text[place] for place in places).translate(_LOWER)
        is_hidden = bytearray(len(text))
        for size, hidden in self._hidden.items():
            for start in range(len(plain) - size + 1):
                if plain[start : start + size] in hidden:
                    first, last = places[start], places[start + size - 1]
                    is_hidden[first : last + 1] = b"\1" * (last + 1 - first)
        parts = groupby(zip(text, is_hidden, strict=True), key=lambda pair: pair[1])
        return "".join(HIDDEN if hides else "".join(letter for letter, _ in pairs) for hides, pairs in parts)


def _forms(secret: str) -> set[str]:
    """The forms in which a service may write a text: plain, in URLs, HTML, JSON, hex and base64; in
    lower case and without backslashes.
    """
    data = secret.encode(errors="surrogatepass")
    # .NET writes + as \u002B
    in_json = "".join(letter if letter.isalnum() else f"u{ord(letter):04x}" for letter in secret)
    forms = {secret, quote(data, safe=""), html.escape(secret), in_json, data.hex()}
    # base64 inside a longer text: without the letters that share bits with neighbouring bytes
    for before in range(3):
        encoded = base64.b64encode(b"x" * before + data).decode().rstrip("=")
        whole = encoded[-(-before * 4 // 3) : len(encoded) - ((len(data) + before) % 3 != 0)]
        forms |= {whole, whole.replace("+", "-").replace("/", "_")}
    return {form.translate(_LOWER).replace("\\", "") for form in forms if len(form) >= SECRET_CHARS_MIN}


def refuse_secrets(tree: Any, kept: Any = None) -> None:
    """Raises ValueError, without the secret in it, for a config with a secret: configs are Prefect
    parameters, and stored. Values that `kept` has in the same place are allowed: they are stored
    already, for a run that began under older rules.
    """
    known = set(_strings(kept, ()))
    for path, value in _strings(tree, ()):
        if (path, value) in known:
            continue
        where = ".".join(path)
        if _IN_URL.search(value):
            raise ValueError(
                f"{where} is a URL with a user or password, which would end up in the store and in Prefect; leave them"
                " out and use the environment: MLFLOW_TRACKING_URI or MLFLOW_TRACKING_TOKEN, AWS_ACCESS_KEY_ID and"
                " AWS_SECRET_ACCESS_KEY, RLPIPE_SERVICE_KEY, key_env of a reward"
            )
        if _has_key(value):
            raise ValueError(
                f"{where} is a URL whose query holds a key, which would end up in the store and in Prefect; put the URL"
                " into a variable of the environment (a reward takes it as url = '$NAME')"
            )
        # an entry of a list: --api-key, or NAME=value
        flag = re.match(r"-*([\w-]+)(=|$)", value) if path[-1].isdecimal() else None
        name = flag[1] if flag else path[-1]
        is_variable = name.isupper() or path[:2] == ("engines", "environment")
        if value.lower() not in _SWITCHES and (
            is_secret_variable(name, value[flag.end() :] if flag else value) if is_variable else _is_secret(name)
        ):
            raise ValueError(
                f"{where} looks like a secret, which would end up in the store and in Prefect; set it in the"
                " environment of the processes that need it (child processes inherit it), or call the field otherwise"
            )


def is_secret_variable(name: str, value: str = "") -> bool:
    """True when an environment variable counts as a secret: by its name (MY_TOKEN, OPENAI_KEY,
    DB_PASS, passphrase), or as a URL with a password or a key.

    Not `PWD`, the working directory, and not a number whose name continues after such a word
    (TOKEN_RATIO).
    """
    words = _words(name)
    named = _VARIABLE.fullmatch(words) if words not in ("pwd", "oldpwd") else None
    return (named is not None and not (named["of"] and _NUMBER.fullmatch(value))) or _has_key(value)


class Secrets(NamedTuple):
    """Environment variables that users' code gets although they look like secrets, and others that
    it does not get although they do not.
    """

    passed: Collection[str] = ()
    withheld: Collection[str] = ()

    def without(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The environment variables that are not secrets, and those that are passed."""
        return {
            name: value for name, value in variables.items() if name in self.passed or not self._is_secret(name, value)
        }

    def _is_secret(self, name: str, value: str) -> bool:
        return name in self.withheld or (value.lower() not in _SWITCHES and is_secret_variable(name, value))


def named_variables(args: Any) -> set[str]:
    """The environment variables that arguments of rewards name: `key_env = "NAME"`, any text
    `$NAME`, and those of Secret blocks.
    """
    texts = [(path[-1], value) for path, value in _strings({"args": with_variables(args)}, ())]
    return {value.removeprefix("$") for name, value in texts if name == "key_env" or value.startswith("$")} - {""}


def named_blocks(args: Any) -> dict[str, str]:
    """The Secret blocks of Prefect that arguments of rewards name, `key_env` or `url` =
    `{"block": NAME}`: each with the environment variable that flows put its value into.
    """
    blocks: dict[str, str] = {}
    for name, value in args.items() if isinstance(args, dict) else ():
        blocks |= {block: _variable_of(block)} if (block := _block_of(name, value)) else named_blocks(value)
    return blocks


def with_variables(args: Any) -> Any:
    """The arguments with the environment variable of each Secret block in its place."""
    if not isinstance(args, dict):
        return args
    return {
        name: _NAMING[name] + _variable_of(block) if (block := _block_of(name, value)) else with_variables(value)
        for name, value in args.items()
    }


def _block_of(name: str, value: Any) -> str:
    """The Secret block that an argument names; empty where it names none."""
    is_block = name in _NAMING and isinstance(value, dict) and value.keys() == {"block"}
    return value["block"] if is_block and isinstance(value["block"], str) else ""


def _variable_of(block: str) -> str:
    return f"RLPIPE_SECRET_{block.upper().replace('-', '_')}"


def _is_secret(name: str) -> bool:
    """True when the name is that of a secret config field."""
    return _FIELD.fullmatch(_words(name)) is not None


def _has_key(value: str) -> bool:
    """True when a text is a URL with a password before its host, or with a key in its query."""
    named = _QUERY.findall(value) if "://" in value else []
    return bool(_IN_URL.search(value)) or any(_is_secret(name) or _QUERY_NAME.fullmatch(_words(name)) for name in named)


def _words(name: str) -> str:
    """A name in lower case, with underscores between its words: `apiKey`, `api-key` and `API_KEY`
    are equal.
    """
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()).strip("_")


def _strings(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields each text in the tree with its path.

    Entries of a list have their name, as in `--set`, or their index.
    """
    if isinstance(tree, str) and path:
        yield path, tree
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _strings(value, (*path, str(key)))
    if isinstance(tree, list):
        for index, value in enumerate(tree):
            name = value.get("name") if isinstance(value, dict) else None
            yield from _strings(value, (*path, name if isinstance(name, str) else str(index)))
