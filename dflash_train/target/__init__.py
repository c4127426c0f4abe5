"""The frozen large model: forward, capture of chosen layers, cache, tree forward, commit.

TARGETS maps `target.kind` to the module that has it: each exports `Options` (a dataclass) and
`load(config: TargetConfig, hardware: HardwareConfig) -> TargetModel`.
"""

TARGETS = {
    "hf": "dflash_train.target.hf",
    "gguf_wheel": "dflash_train.target.gguf_wheel",
    "tiny": "dflash_train.target.tiny",
}
