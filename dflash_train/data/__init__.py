"""Recipes, importers, the only chat renderer, mixing, deduplication, decontamination.

SOURCES maps `data.sources.<name>.kind` to the module that has it: each exports
`read(name, config: SourceConfig, data: DataConfig) -> Iterator[RawRow]` and OPTIONS, the options dataclass of each
kind.
"""

SOURCES = {
    "files": "dflash_train.data.sources",
    "hub": "dflash_train.data.sources",
    "evals": "dflash_train.data.packages",
    "stdlib_code": "dflash_train.data.packages",
    "pydoc": "dflash_train.data.packages",
    "bfcl": "dflash_train.data.packages",
    "chatterbot": "dflash_train.data.packages",
}
