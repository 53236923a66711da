"""The source of a model: a folder, the hub, a folder on S3, or the newest policy of another run.

All become a local folder in HF format.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict, expanded, size_text
from rlpipe.config.model import ModelConfig
from rlpipe.config.pipeline import RUN, PipelineConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.links import check_links
from rlpipe.data.template_text import write_template
from rlpipe.data.tokenizer_files import TOKENIZER_FILES
from rlpipe.loop.session import work_dir_of
from rlpipe.models.folder import INDEX, folder_config, tensor_shapes, weight_files
from rlpipe.models.whole import whole_policy
from rlpipe.store.artifacts import PRUNED, is_pruned
from rlpipe.store.backend import Store, open_store
from rlpipe.store.deltas import DELTA
from rlpipe.store.disk import link
from rlpipe.store.local_copy import made_once, way_to_remake
from rlpipe.store.opening import open_existing
from rlpipe.store.outside import OutsideFile, fetch_files, fetched_folder, files_text, is_outside, outside_files
from rlpipe.store.policy_files import base_of, stored_policy
from rlpipe.store.progress import Progress

IMPORT_GGUF = ".venv/bin/python scripts/import_gguf.py"
MODEL_FILES = {"config.json", "generation_config.json", INDEX}
NEEDED = ("config.json", "tokenizer.json")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
HUB_COPIES = ["*/*", "consolidated*"]  # of the same weights, for other programs
HUB_TIMEOUT_S = 10.0
FIELD = "model.path"


class SourcePolicy(TypedDict):
    """The policy of another run that is used as a model: its reference, the run and the weight
    version.
    """

    folder: str
    sha256: str
    run: str
    version: int


@dataclass(frozen=True)
class ModelSource:
    """A model in HF format on this machine.

    `place`: its address for a person. `policy`: set when the model is the policy of a run.
    """

    folder: Path
    place: str
    policy: SourcePolicy | None = None


def source_of(config: PipelineConfig, field: str = FIELD, name: str = "") -> ModelSource:
    """The model that a field names, by default `model.path`.

    A model that is not on this machine is copied to `scratch`, whole and verified, once.

    UserError, which names the field, when it is no model in HF format, when the run has no policy,
    or when the policy was pruned.
    """
    name = name or config.model.path
    if name.startswith(RUN):
        store = open_store(config.store)
        policy, version = newest_policy(store, field, name)
        copies = _copies(config)
        copies.mkdir(parents=True, exist_ok=True)
        run = name.removeprefix(RUN)
        folder = with_trained_template(whole_policy(store, policy, copies), open_existing(store, run).config.model)
        source: SourcePolicy = {"folder": policy.folder, "sha256": policy.sha256, "run": run, "version": version}
        return ModelSource(folder, store.address(policy.folder), source)
    if is_outside(name):
        folder = fetch_files(field, name, _files_on_s3(field, name), _models(config))
        return ModelSource(_checked(folder, field, name), name)
    folder = model_folder(config.model.model_copy(update={"path": name}), field)
    return ModelSource(folder, str(folder))


def model_files(folder: Path) -> list[Path]:
    """The files of a model in HF format, and of its tokenizer, that exist in `folder`."""
    return [folder / name for name in MODEL_FILES | TOKENIZER_FILES] + weight_files(folder)


def newest_policy(store: Store, field: str, name: str) -> tuple[ArtifactRef, int]:
    """The newest policy of the run that a field names, and its weight version; UserError when it
    has none, or its files were pruned.
    """
    try:
        source = open_existing(store, name.removeprefix(RUN))
    except UserError as error:
        raise UserError(f"{field}={name!r}: {error}") from error
    progress = Progress(source)
    if not progress.sft_complete or not progress.has_base:
        raise UserError(f"{field}={name!r}: the SFT of that run is not complete, so it has no policy yet")
    version = progress.num_iterations
    policy, manifest = source.policy(version)
    if is_pruned(store, policy.folder):
        raise UserError(
            f"{field}={name!r}: its newest policy, version {version}, was pruned; {way_to_remake(manifest)}"
        )
    return policy, version


def with_trained_template(folder: Path, model: ModelConfig) -> Path:
    """The folder of a policy, or one beside it with the chat template of training: older code
    stored the template of the base model instead.
    """
    if not (model.chat_template or model.chat_template_args):
        return folder
    target = folder.with_name(f"{folder.name}-trained")
    if not target.is_dir():
        with made_once(target) as partial:
            shutil.copytree(folder, partial, copy_function=link, dirs_exist_ok=True)
            write_trained_template(model, partial)
    return target


def write_trained_template(model: ModelConfig, folder: Path) -> None:
    """Writes the chat template that the run trains with into a tokenizer's folder, where the config
    has a template or values for it.
    """
    if model.chat_template or model.chat_template_args:
        trained = ChatTokenizer.from_folder(folder, model.chat_template, model.chat_template_args)
        write_template(folder, trained.template_text)


def _copies(config: PipelineConfig) -> Path:
    """The folder of copies of other runs' policies.

    They are needed while this run makes its own copy in the store.
    """
    return work_dir_of(config) / "source"


def forget_copies(config: PipelineConfig) -> None:
    """Removes the local copies of other runs' policies; the store still has them."""
    shutil.rmtree(_copies(config), ignore_errors=True)


def _models(config: PipelineConfig) -> Path:
    """The folder in which models of S3 are kept, for all runs of this machine."""
    return config.scratch_folder / "models"


def _files_on_s3(field: str, url: str) -> list[OutsideFile]:
    """The files of a model's folder on S3; UserError when the folder holds no model, before any
    large file is fetched.
    """
    if url.endswith(".gguf"):
        raise UserError(
            f"{field}={url!r} is a GGUF file: download it, and make a folder of it with `{IMPORT_GGUF} FILE FOLDER`"
        )
    files = {file.name: file for file in outside_files(field, url)}
    if not files:
        raise UserError(f"{field}={url!r}: there is no such folder in the bucket")
    _check_names(files, field, url)
    named = MODEL_FILES | TOKENIZER_FILES
    weights = (
        name
        for name in files
        if name.endswith(".safetensors") and "/" not in name and not name.startswith("consolidated")
    )
    chosen = ["model.safetensors"] if "model.safetensors" in files else [*weights]  # as transformers chooses
    return [file for name, file in files.items() if name in named or name in chosen]


def _check_names(names: Any, field: str, path: str) -> None:
    """UserError unless these file names are those of a model."""
    if DELTA in names:
        raise UserError(
            f"{field}={path!r} is stored as a difference to another policy: `rlpipe export` makes a model folder of it"
        )
    missing = [name for name in NEEDED if name not in names]
    if missing or not any(name.endswith(".safetensors") for name in names):
        wanted = ", ".join(missing or ["*.safetensors"])
        raise UserError(
            f"{field}={path!r} is no model in HF format: {wanted} is missing; leave {field} empty for a new model"
        )


def _checked(folder: Path, field: str, path: str) -> Path:
    """The folder; UserError unless it holds a model, in files of its own, and the files of weights
    are complete.
    """
    _check_names([file.name for file in folder.iterdir() if file.is_file()], field, path)
    named = [folder / name for name in MODEL_FILES | TOKENIZER_FILES]
    check_links(f"{field}={path!r}", folder, [*named, *folder.glob("*.safetensors")])
    try:
        tensor_shapes(folder)
    except StoreError as error:
        raise UserError(f"{field}={path!r}: {error}") from error
    return folder


def model_folder(model: ModelConfig, field: str = FIELD) -> Path:
    """The local folder of `model.path`; UserError, which names the field, when it is no model in HF
    format.
    """
    folder = expanded(model.path)
    if folder.suffix == ".gguf":
        raise UserError(
            f"{field}={model.path!r} is a GGUF file: make a folder of it with `{IMPORT_GGUF} {model.path} FOLDER`"
        )
    if (folder.parent / PRUNED).is_file():
        raise UserError(
            f"{field}={model.path!r} was pruned: make it again with `rlpipe export RUN --version K --to DIR`, and"
            " name DIR"
        )
    if not folder.is_dir():
        if model.path.startswith(("/", "~", ".")):  # not a name on the hub
            hint = f"`make smollm2` makes the one of preset smollm2, `{IMPORT_GGUF} FILE FOLDER` one of any GGUF file"
            raise UserError(f"{field}={model.path!r}: there is no such folder; {hint}")
        folder = _snapshot(model.path, field)
    return _checked(folder, field, model.path)


@contextlib.contextmanager
def _from_hub(name: str, field: str) -> Iterator[None]:
    """Raises UserError for errors of the hub with the model of that name."""
    # HTTPError is that of the HTTP client below, which changes with the hub's version; the other
    # two are about its proxy
    from huggingface_hub.errors import HFValidationError, HTTPError  # pyright: ignore[reportPrivateImportUsage]

    try:
        yield
    except (OSError, HFValidationError, HTTPError, ImportError, ValueError) as error:
        raise UserError(
            f"{field}={name!r} is neither a folder nor a model of the hub that can be reached from here ({error})"
        ) from error


def _snapshot(name: str, field: str, local_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    with _from_hub(name, field):
        return Path(
            snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES, local_files_only=local_only)
        )


def place_of_model(config: PipelineConfig) -> tuple[str, JsonDict]:
    """The place of the model of `model.path`, as text for a plan, and its config.json.

    Nothing else of the model is downloaded. UserError as `source_of`.
    """
    name = config.model.path
    if name.startswith(RUN):
        store = open_store(config.store)
        policy, version = newest_policy(store, FIELD, name)
        whole = stored_policy(store, base_of(store, policy) or policy)  # an adapter has the shapes of its base
        size = sum(record.bytes for record in whole.files.values())
        text = f"version {version} of run {name.removeprefix(RUN)}, {size_text(size)}"
        return text, _config_in(whole.read("config.json"))
    if is_outside(name):
        files = _files_on_s3(FIELD, name)
        folder = fetched_folder(name, files, _models(config))
        (document,) = (file for file in files if file.name == "config.json")
        with document.open() as opened:
            return f"{name}, {files_text(files)}; the run fetches it to {folder}", _config_in(opened.read())
    return _place_of_folder(config.model)


def _config_in(document: bytes) -> JsonDict:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(document)
        return folder_config(Path(folder))


def _place_of_folder(model: ModelConfig) -> tuple[str, JsonDict]:
    if expanded(model.path).exists() or model.path.startswith(("/", "~", ".")):
        folder = model_folder(model)
        return str(folder), folder_config(folder)
    with contextlib.suppress(UserError):
        folder = _snapshot(model.path, FIELD, local_only=True)
        if any(folder.glob("*.safetensors")):  # an earlier plan may have left the config there
            return f"{model.path} in {folder}", folder_config(folder)
    from huggingface_hub import hf_hub_download

    with _from_hub(model.path, FIELD):
        config = Path(hf_hub_download(model.path, "config.json", etag_timeout=HUB_TIMEOUT_S))
    return f"{model.path} of the hub; the run downloads it", folder_config(config.parent)
