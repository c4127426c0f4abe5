"""The frozen large model: forward, capture of chosen layers, cache, tree forward, commit.

TARGETS maps `target.kind` to the module that has it. Each exports `Options` (a dataclass) and

    weights(config) -> WeightsStatus            can the weights be had? Nothing is downloaded: for the stages' tables
    prepare(config) -> TargetFiles              folder, tokenizer, spec with fingerprint; fetched, but not loaded
    load(config, hardware) -> TargetModel       loaded onto the device

`mask_token.check_mask_token(target.mask_token_id, files)` takes
what `prepare` returns (a loaded target has it as `.files`).
"""

TARGETS = {
    "hf": "dflash_train.target.hf",
    "gguf_wheel": "dflash_train.target.gguf_wheel",
    "tiny": "dflash_train.target.tiny",
    "random": "dflash_train.target.random_weights",
}
