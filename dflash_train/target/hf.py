"""Any Hugging Face causal LM of full-attention and Gated DeltaNet layers (Qwen and Llama families), frozen."""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_train.config import SPREAD_ABOVE, HardwareConfig, TargetConfig
from dflash_train.records import Features, FeatureSpec, TargetHead
from dflash_train.target import files, fused
from dflash_train.target.attention import HFSession
from dflash_train.target.base import Taps, WeightsStatus, check_layer_ids
from dflash_train.target.mask_token import check_mask_token
from dflash_train.target.qwen3_5 import HybridSession
from dflash_train.util.device import pick_device
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers
from dflash_train.util.io import human_bytes
from dflash_train.util.log import say


@dataclass
class Options:
    """None: folder or hub id, dtype, template and revision are in TargetConfig."""


def weights(config: TargetConfig) -> WeightsStatus:
    """For the stages' tables: are the weights here, or can they be downloaded?"""
    return files.weights_status(config)


def prepare(config: TargetConfig) -> files.TargetFiles:
    """Folder, tokenizer, sizes and fingerprint; weights are on disk afterwards, but not loaded."""
    return files.prepare(config)


def load(config: TargetConfig, hardware: HardwareConfig) -> "HFTarget":
    """Check everything that needs no weights, then load them onto the device. Raises UserError for what cannot run.

    A weight that is not in the files is an error, never a random one.
    """
    prepared = prepare(config)
    if config.mask_token_id is not None:
        check_mask_token(config.mask_token_id, prepared)
    device = pick_device(hardware.device, hardware.num_threads)
    # dtype= here, never .to(bfloat16) afterwards: that would round RoPE's inv_freq as well.
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        prepared.folder, dtype=getattr(torch, config.dtype), attn_implementation="sdpa", output_loading_info=True,
        trust_remote_code=config.trust_remote_code, use_safetensors=True,
        ignore_mismatched_sizes=True,  # so that they are listed, and refused below with their names
        device_map=placement(prepared, config.dtype, device),
    )  # fmt: skip
    refuse_missing(info, prepared)
    device = model.get_input_embeddings().weight.device
    model.eval().requires_grad_(False)
    return HFTarget(prepared, model, device, fused.choose(config.kernels, model, device))


def placement(prepared: files.TargetFiles, dtype: str, device: torch.device) -> dict | str | None:
    """Where the layers go: on the one device, or spread over the visible GPUs when the weights exceed the free memory
    of one. As many GPUs as processes share a host leave one to each, so only a process alone spreads."""
    if device.type != "cuda":
        return None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or torch.cuda.device_count() == 1:
        return {"": device}
    num_bytes = files.weight_bytes(prepared.folder, dtype)
    if num_bytes <= SPREAD_ABOVE * torch.cuda.mem_get_info(device)[0]:
        return {"": device}
    say(f"target {prepared.spec.name}: {human_bytes(num_bytes)} of weights are spread over "
        f"{torch.cuda.device_count()} GPUs")  # fmt: skip
    return "auto"


def refuse_missing(info: dict, prepared: files.TargetFiles) -> None:
    """Raise UserError when a weight was not in the files, or had another shape. A tied head is never in the files."""
    tied = prepared.hf_config.get_text_config().tie_word_embeddings
    missing = [name for name in info["missing_keys"] if not (tied and name == "lm_head.weight")]
    wrong = [str(item) for item in info["mismatched_keys"]]
    if missing or wrong or info["error_msgs"]:
        names = sorted(missing + wrong + list(info["error_msgs"]))
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise UserError(f"weights in {prepared.folder}", got=f"{len(names)} missing or wrong: {shown}",
                        want="every weight of the model")  # fmt: skip


class HFTarget:
    """A frozen model behind the protocol base.TargetModel."""

    def __init__(self, prepared: files.TargetFiles, model, device: torch.device,
                 fused_capture: fused.FusedCapture | None = None):  # fmt: skip
        self.files, self.model, self.device, self.fused_capture = prepared, model, device, fused_capture
        self.spec, self.tokenizer = prepared.spec, prepared.tokenizer
        self.decoder = model.get_decoder()
        self.layers = self.decoder.layers
        self.text_config = model.config.get_text_config()
        self.lm_head = model.get_output_embeddings()
        self.dtype = self.lm_head.weight.dtype
        self.layer_devices = {i: next(layer.parameters()).device for i, layer in enumerate(self.layers)}
        self.delta_layers = [i for i, layer in enumerate(self.layers) if "linear_attn" in layer._modules]
        self.attention_layers = [i for i in range(len(self.layers)) if i not in self.delta_layers]
        self.head_dim = self.layers[self.attention_layers[0]].self_attn.head_dim
        pad = self.tokenizer.pad_token_id
        # Only our arguments steer generation, not what a model's generation_config.json asks for.
        model.generation_config = transformers.GenerationConfig(
            eos_token_id=list(self.spec.stop_ids), pad_token_id=self.spec.stop_ids[0] if pad is None else pad
        )

    @torch.inference_mode()
    def capture(self, token_ids: Tensor, layer_ids: tuple[int, ...], last_hidden: bool = False) -> Features:
        """Right-padded token_ids i64[B, T] -> hidden [B, T, L*H] in the order of layer_ids and last_hidden [B, T, H].

        No mask is needed: under causal attention, convolution and recurrence a row sees rows to its left, and padding
        lies to its right, so only the (unused) padding rows read padding. One document a row, nothing packed: a
        neighbour would reach into a recurrent state. The head is never called; without last_hidden the pass ends after
        the last captured layer.
        """
        if layer_ids or not last_hidden:
            check_layer_ids(layer_ids, self.spec.num_layers)
        if self.fused_capture is not None:
            return self.fused_capture(token_ids.to(self.device), layer_ids, last_hidden)
        normed = None
        with Taps(self.layers, layer_ids, stop=not last_hidden) as taps:
            normed = self.decoder(input_ids=token_ids.to(self.device), use_cache=False).last_hidden_state
        return Features(taps.hidden(), normed)

    def session(self, capacity: int, features: FeatureSpec) -> HFSession:
        """A fresh sequence with its own cache of `capacity` rows, tree nodes included."""
        return (HybridSession if self.delta_layers else HFSession)(self, capacity, features)

    def logits(self, normed: Tensor) -> Tensor:
        """Rows after the final norm [..., H] -> [..., V] float32."""
        return self.lm_head(normed).float()

    def head(self) -> TargetHead:
        """Embedding, head and final norm as they lie in the model."""
        embedding = self.model.get_input_embeddings().weight.detach()
        tied = self.lm_head.weight.data_ptr() == embedding.data_ptr()
        norm = self.decoder.norm
        return TargetHead(embedding, embedding if tied else self.lm_head.weight.detach(), norm.weight.detach(),
                          files.NORM_OFFSETS[self.text_config.model_type], self.text_config.rms_norm_eps)  # fmt: skip

    @torch.inference_mode()
    def answer(self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, top_p: float, top_k: int,
               seed: int) -> list[tuple[list[int], str]]:  # fmt: skip
        """Answer a batch with the library's own generate -> per prompt (ids with the stop token, "stop" | "length").

        Greedy at temperature 0. The same seed, batch and device give the same answers; the global random state
        is left as it was.
        """
        width = max(map(len, prompts))
        pad = self.model.generation_config.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        samplers = [TopSampler(temperature, top_p, top_k)] if temperature > 0 else []
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            out = self.model.generate(input_ids=ids.to(self.device), attention_mask=mask.to(self.device),
                                      max_new_tokens=max_new_tokens, do_sample=False,
                                      logits_processor=transformers.LogitsProcessorList(samplers))  # fmt: skip
        return [cut_at_stop(row, self.spec.stop_ids) for row in out[:, width:].tolist()]


class TopSampler(transformers.LogitsProcessor):
    """Temperature, then top-k (0 = off), then top-p, then the draw itself; the loop's argmax finds the drawn token.

    The library's own chain sorts and draws over the whole vocabulary: a third of a step for 32 rows of 49,152 on a CPU.
    Here only the k best are sorted. The law is the same: a token stays while the mass before it is below top_p.
    """

    def __init__(self, temperature: float, top_p: float, top_k: int):
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [B, V] -> [B, V], 0 at the drawn token and -inf elsewhere."""
        num = min(self.top_k or scores.shape[-1], scores.shape[-1])
        best, token_ids = (scores.float() / self.temperature).topk(num, dim=-1)
        probs = best.softmax(-1)
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= self.top_p, 0.0)
        drawn = token_ids.gather(-1, torch.multinomial(probs, 1))
        return torch.full_like(scores, float("-inf")).scatter_(-1, drawn, 0.0)


def cut_at_stop(token_ids: list[int], stops: tuple[int, ...]) -> tuple[list[int], str]:
    """Up to and with the first stop token."""
    for i, token_id in enumerate(token_ids):
        if token_id in stops:
            return token_ids[: i + 1], "stop"
    return token_ids, "length"
