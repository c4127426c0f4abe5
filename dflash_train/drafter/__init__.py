"""The block-diffusion drafter: anchors, masks, model, objective; `naive.py` holds the slow obvious twins.

Shapes: B batch rows, T tokens, N anchors, S block slots, Q = N*S, L captured layers, D hidden, V vocab, H heads,
K head dim, M tree nodes. Tensors in math code carry them as suffix: hidden_BTD.

DRAFTERS maps `drafter.kind` to the module that has it: each exports `Options` and the model class as `Drafter`.
"""

DRAFTERS = {"dflash": "dflash_train.drafter.dflash"}
