"""Hidden-state shards: their bytes, markers, staging, upload, and the order in which training reads them.

STORES maps `store.kind` to the module that has it: each exports `Options` (a dataclass) and
`open_store(config: StoreConfig, name: str) -> ObjectStore`, whose keys live under `<root>/<name>/`.
"""

STORES = {
    "local": "dflash_train.store.local",
    "s3": "dflash_train.store.s3",
    "stream": "dflash_train.store.stream",
}
