"""What the Hugging Face hub says about a data set, for next to no download: revision, access, files, rows, columns.

One `Hub` a process asks each question once, so one run never mixes two revisions of a set. Listings are kept on disk by
commit sha: a set whose files are all here needs no network. `files.py` downloads and reads.
"""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data.hub.errors import Unreachable, ask, dataset_page, no_token
from dflash_train.data.row_files import SUFFIXES
from dflash_train.util.errors import UserError
from dflash_train.util.io import cache_dir, read_json, write_json
from dflash_train.util.provenance import digest

SHA = re.compile(r"[0-9a-f]{40}")
HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)
FILES_A_REQUEST = 200
INFO_TIMEOUT_S = 60

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class HubFile:
    """One file at one commit. digest: "sha256:<hex>" of a large file, "git:<sha1 of the blob>" of a small one."""

    path: str
    num_bytes: int
    digest: str

    @property
    def suffix(self) -> str:
        """The longest of SUFFIXES that the name ends in, "" where there is none."""
        return max((suffix for suffix in SUFFIXES if self.path.endswith(suffix)), key=len, default="")


@dataclass(frozen=True)
class Listing:
    """The files of one split of one subset at one commit, in the set's order. rows: as its card counts them."""

    dataset: str
    sha: str
    subset: str
    split: str
    rows: int | None
    files: tuple[HubFile, ...]


@cache
def hub() -> "Hub":
    """This process's view of the hub."""
    return Hub()


class Hub:
    """Asks, and remembers every answer, and that there is no way to the hub at all."""

    def __init__(self):
        self.answers: dict[tuple, object] = {}
        self.reached = False
        self.down: Unreachable | None = None

    def once(self, key: tuple, call: Callable[[], Answer]) -> Answer:
        """`call()`, or what it gave before in this process."""
        if key not in self.answers:
            self.answers[key] = call()
        return self.answers[key]

    def ask(self, name: str, config: SourceConfig, call: Callable[[], Answer]) -> Answer:
        """errors.ask; without a connection only the first question waits for one, and briefly."""
        if self.down is not None:
            got = f"not asked either: {str(self.down.got).partition(' (')[0]}"
            raise Unreachable(f"data.sources.{name}: data set {config.path}", got=got, fix=self.down.fix)
        try:
            answer = ask(name, config, call, retry_network=self.reached)
        except Unreachable as error:
            self.down = error
            raise
        self.reached = True
        return answer

    def info(self, name: str, config: SourceConfig):
        """huggingface_hub's DatasetInfo at config.revision: sha, gated, card_data. Raises UserError."""
        require_hub_id(name, config)
        call = lambda: client().dataset_info(config.path, revision=config.revision, timeout=INFO_TIMEOUT_S)
        return self.once(("info", config.path, config.revision), lambda: self.ask(name, config, call))

    def sha(self, name: str, config: SourceConfig) -> str:
        """The commit that config.revision (null: the newest) means in this run."""
        return config.revision if is_sha(config.revision) else self.info(name, config).sha

    def require_access(self, name: str, config: SourceConfig) -> None:
        """Raises UserError, with the page of its licence, when the set is gated and this token may not read it."""
        from huggingface_hub import get_token

        if config.options.get("gated") and get_token() is None:
            raise no_token(name, config)
        call = lambda: client().auth_check(config.path, repo_type="dataset")
        self.once(("access", config.path), lambda: self.ask(name, config, call))

    def listings(self, name: str, config: SourceConfig) -> list[Listing]:
        """The files of each of the source's subsets. Raises UserError naming what exists where one does not."""
        require_hub_id(name, config)
        return [self.listing(name, config, subset) for subset in subsets(config)]

    def listing(self, name: str, config: SourceConfig, subset: str | None) -> Listing:
        sha = self.sha(name, config)
        found = kept_listing(config, subset, sha)
        if found is None:
            self.require_access(name, config)
            found = self.resolve(name, config, subset, sha)
            write_json(listing_path(config, subset, sha), asdict(found))
        return found

    def resolve(self, name: str, config: SourceConfig, subset: str | None, sha: str) -> Listing:
        """Which files a subset and a split are: what `datasets` makes of the card and the names of the files."""
        import datasets

        where = {"path": f"hf://datasets/{config.path}", "revision": sha}  # never a local folder of that name
        try:
            builder = self.ask(name, config, lambda: datasets.load_dataset_builder(name=subset, **where))
        except UserError as error:
            if isinstance(error.__cause__, ValueError) and subset not in subset_names(name, config, sha):
                raise no_subset(name, config, subset, sha) from None
            raise
        if builder.hash != sha:  # an older copy in the library's own cache, which it takes where the hub says no
            raise UserError(f"data.sources.{name}: data set {config.path}", got=f"no answer for commit {sha}",
                            want="its files", fix="run it again")  # fmt: skip
        if not builder.config.data_files:
            raise no_subset(name, config, subset, sha)
        splits = {str(split): list(files) for split, files in builder.config.data_files.items()}
        if config.split not in splits:
            raise UserError(
                f"data.sources.{name}.split", got=f"'{config.split}', which {config.path} does not have",
                want=f"one of {', '.join(sorted(splits))} (subset {builder.config.name}, commit {sha[:12]})",
                fix=f"data.sources.{name}.split={sorted(splits)[0]}",
            )  # fmt: skip
        prefix = f"hf://datasets/{config.path}@{sha}/"
        paths = [url.removeprefix(prefix) for url in splits[config.split] if url.startswith(prefix)]
        if len(paths) != len(splits[config.split]) or vars(builder.config).get("field"):
            raise unreadable(name, config, "files inside archives or elsewhere")
        counts = builder.info.splits or {}
        rows = counts[config.split].num_examples if config.split in counts else None
        files = self.files(name, config, sha, paths)
        return Listing(config.path, sha, builder.config.name, config.split, rows, files)

    def files(self, name: str, config: SourceConfig, sha: str, paths: list[str]) -> tuple[HubFile, ...]:
        """Sizes and digests of the set's files, in the order of `paths`."""
        found = {}
        for start in range(0, len(paths), FILES_A_REQUEST):
            some = paths[start : start + FILES_A_REQUEST]
            call = lambda some=some: client().get_paths_info(config.path, some, repo_type="dataset", revision=sha)
            for file in self.ask(name, config, call):
                text = f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}"
                found[file.path] = HubFile(file.path, file.size, text)
        odd = [path for path in paths if not (path in found and found[path].suffix)]
        if odd:
            raise unreadable(name, config, f"{odd[0]}" + (f" and {len(odd) - 1} more" if len(odd) > 1 else ""))
        return tuple(found[path] for path in paths)


def client():
    """huggingface_hub's API client, at HF_ENDPOINT, with HF_TOKEN or the token of `hf auth login`."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # our own lines say the same once, for all files
    return HfApi()


def listing_path(config: SourceConfig, subset: str | None, sha: str) -> Path:
    return cache_dir("hub", folder_name(config.path), "listings", f"{digest([sha, subset, config.split])}.json")


def kept_listing(config: SourceConfig, subset: str | None, sha: str) -> Listing | None:
    """What an earlier run was told of this commit, which never changes."""
    path = listing_path(config, subset, sha)
    if not path.exists():
        return None
    plain = read_json(path)
    return Listing(**{**plain, "files": tuple(HubFile(**file) for file in plain["files"])})


def subsets(config: SourceConfig) -> list[str | None]:
    """The subsets that the source reads, one after another; [None] = the set's default."""
    return config.options.get("subsets") or [config.subset]


def is_hub_id(path: str | None) -> bool:
    """Whether it can be the name of a data set on the hub."""
    return bool(path and HUB_ID.fullmatch(path))


def require_hub_id(name: str, config: SourceConfig) -> None:
    """Raises UserError for a path that no data set can have."""
    if is_hub_id(config.path):
        return
    local = bool(config.path) and Path(config.path).expanduser().exists()
    fix = (
        f"data.sources.{name}.kind=files, since {config.path} is here" if local else f"data.sources.{name}.path=<that>"
    )
    raise UserError(f"data.sources.{name}.path", got=config.path, want="owner/name of a data set on the hub", fix=fix)


def is_sha(revision: str | None) -> bool:
    """A full commit sha: what a revision must be to mean the same for ever."""
    return bool(revision and SHA.fullmatch(revision))


def folder_name(dataset: str) -> str:
    """The data set's folder in the cache."""
    return re.sub(r"[^A-Za-z0-9._-]", "--", dataset).strip(".")


# ---------------------------------------------------------------- one revision a run


def pin(data: DataConfig, recorded: dict[str, str] | None = None) -> DataConfig:
    """The recipe with every hub source's revision as a commit sha. recorded: shas by source, of a mix made before: they
    are what a null, a tag or a branch means then, and nobody is asked. Raises UserError."""
    sources = {}
    for name, source in data.sources.items():
        if source.kind == "hub" and recorded is None:
            source = replace(source, revision=hub().sha(name, source))
        elif source.kind == "hub" and name in recorded:
            source = replace(source, revision=recorded[name])
        sources[name] = source
    return replace(data, sources=sources)


def recorded_revisions(mix_dir: Path, data: DataConfig) -> dict[str, str]:
    """{source: commit sha} that the complete mix in `mix_dir` was made of, for sources whose revision the recipe leaves
    open; {} where there is no mix."""
    manifest = mix_dir / "manifest.json"
    if not manifest.exists():
        return {}
    made = read_json(manifest).get("sources", {})
    still_open = [name for name, source in data.sources.items() if source.kind == "hub" and not is_sha(source.revision)]
    return {name: made[name]["revision"] for name in still_open if is_sha(made.get(name, {}).get("revision"))}


# ---------------------------------------------------------------- what is not there


def subset_names(name: str, config: SourceConfig, sha: str) -> list[str]:
    """What the set calls its subsets."""
    import datasets

    call = lambda: datasets.get_dataset_config_names(f"hf://datasets/{config.path}", revision=sha)
    return hub().ask(name, config, call)


def no_subset(name: str, config: SourceConfig, subset: str | None, sha: str) -> UserError:
    """The set has other subsets ("configs") than the recipe names: list them."""
    names = subset_names(name, config, sha)
    got = f"'{subset}', which {config.path} does not have" if subset else f"none, and {config.path} has several"
    key = "options.subsets" if config.options.get("subsets") else "subset"
    return UserError(
        f"data.sources.{name}.{key}", got=got, want=f"one of {', '.join(names)} (commit {sha[:12]})",
        fix=f"data.sources.{name}.{key}={names[0]}",
    )  # fmt: skip


def unreadable(name: str, config: SourceConfig, got: str) -> UserError:
    """The split is made of other things than the files that `row_files` reads."""
    return UserError(
        f"data.sources.{name}: data set {config.path}",
        got=f"{got}; this version reads {', '.join(SUFFIXES)}",
        want="plain files of those kinds",
        fix=f"download and convert them (see {dataset_page(config.path)}), then data.sources.{name}.kind=files",
    )
