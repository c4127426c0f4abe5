"""Speculative decoding: one generate loop, one verifier, three proposers.

PROPOSERS maps `eval.method` to the module that has it: each exports `Proposer`.
"""

PROPOSERS = {
    "autoregressive": "dflash_train.decode.autoregressive",
    "dflash": "dflash_train.decode.dflash",
    "ddtree": "dflash_train.decode.ddtree",
}
