"""Eight-bit hidden rows: float8_e4m3fn codes and one float32 scale per token and layer. Plain torch on any device.

    scale = max |x| of the layer's H values / 448, or 1.0 where they are all zero
    code  = e4m3(x / scale)            value = code * scale

448 is e4m3's largest value; 3 bits of mantissa bound the error of a value by 1/16 of it, or by 2^-10 of the scale where
it is very small. e4m3fn has no infinity, and a row with NaN or an infinity gets a scale that is not finite.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LARGEST_CODE = 0x7E
"""448, without the sign bit; 0x7F is NaN."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Below it float32 itself has no full precision (values under 5e-36, which no model makes)."""
_SIGN_AND_CODE = 0x87F0 - (1 << 16)  # as int16


def quantize(rows: Tensor, num_layers: int) -> tuple[Tensor, Tensor]:
    """Rows [n, L*H] of any floating dtype -> (codes float8_e4m3fn [n, L*H], scales f32 [n, L]), on their device.

    One layer at a time: a float32 copy of all layers of a batch would be several GB.
    """
    codes = torch.empty(rows.shape, dtype=E4M3, device=rows.device)
    scales = torch.empty(rows.shape[0], num_layers, dtype=torch.float32, device=rows.device)
    parts = zip(rows.chunk(num_layers, dim=1), codes.chunk(num_layers, dim=1), scales.unbind(1), strict=True)
    for values, code, scale in parts:
        values = values.float()
        largest = values.abs().amax(dim=1)
        # Division, not multiplication by a rounded 1/448: every device gives the same bits.
        scale.copy_(torch.where(largest == 0, 1.0, (largest / LARGEST).clamp(min=SMALLEST_SCALE)))
        code.copy_(values / scale[:, None])
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Codes float8_e4m3fn [n, L*H] and scales f32 [n, L] -> rows [n, L*H] of `dtype`, on their device.

    Codes must not be NaN (read_shard refuses those). `codes.float()` is 3 times slower on a CPU than moving e4m3's bits
    into bfloat16's places: sign, exponent and mantissa keep their order, and only the exponent's bias (127 against 7)
    is left to multiply by, which is exact, for e4m3's subnormals too.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # the sign is extended upwards, so bit 15 has it too
    values = ((bits << 4) & _SIGN_AND_CODE).view(torch.bfloat16).float().mul_(2.0 ** (127 - 7))
    values.unflatten(1, (scales.shape[1], -1)).mul_(scales[:, :, None])
    return values.to(dtype)


def scale_problems(codes: Tensor, scales: Tensor) -> list[str]:
    """What `quantize` cannot have made, in words: each layer of a row uses the whole range, or is zero with scale 1."""
    found = []
    bad = ~(torch.isfinite(scales) & (scales > 0))
    if bad.any():
        found.append(f"{int(bad.any(1).sum())} rows with a scale that is not a positive number")
    largest = (codes.view(torch.uint8) & 0x7F).unflatten(1, (scales.shape[1], -1)).amax(dim=2)
    full = (largest == LARGEST_CODE) | (scales == SMALLEST_SCALE) | ((largest == 0) & (scales == 1.0))
    if not full.all():
        found.append(f"{int((~full).any(1).sum())} rows whose codes do not fill the range of their scale")
    return found
