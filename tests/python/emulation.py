"""What quantizers make of numbers, in float64: codes by their definition, and back."""

import torch

from tandem.recipe import Format

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def blocks(x, size, columnwise, is_square):
    """Slices of the blocks of x: lines of `size` numbers in a row or in a column, or squares."""
    height = size if is_square or columnwise else 1
    width = size if is_square or not columnwise else 1
    for r in range(0, x.shape[0], height):
        for c in range(0, x.shape[1], width):
            yield slice(r, r + height), slice(c, c + width)


def in_fp8(x, dtype, parts, scale_of):
    """x in codes of `dtype`; `scale_of(amax, largest)` is what the numbers of a part are multiplied by."""
    largest = torch.finfo(dtype).max
    result = torch.zeros(x.shape, dtype=torch.float64)
    for part in parts:
        numbers = x[part].detach().float()
        scale = scale_of(numbers.abs().max(), largest)
        codes = (numbers * scale).clamp(-largest, largest).to(dtype)
        result[part] = (codes.float() * (1 / scale.double()).float()).double()
    return result


def reaching_the_largest(pow2, epsilon):
    """The scale that makes the largest number the largest code, or the power of two at or below that scale."""

    def scale_of(amax, largest):
        amax = amax.clamp(min=epsilon).double()
        scale = torch.tensor(1.0) if amax == 0 else (largest / amax).float()
        return torch.ldexp(torch.tensor(1.0), torch.frexp(scale)[1] - 1) if pow2 else scale

    return scale_of


def power_of_mxfp8(amax, largest):
    """One over the power of two at or above amax / largest."""
    mantissa, exponent = torch.frexp(amax * torch.tensor(1 / largest, dtype=torch.float32))
    return torch.tensor(1.0) if mantissa == 0 else torch.ldexp(torch.tensor(1.0), (mantissa == 0.5).int() - exponent)


def in_one_block(x, dtype, pow2=False, epsilon=0.0):
    return in_fp8(x, dtype, [...] if x.numel() else [], reaching_the_largest(pow2, epsilon))


def in_blocks_of_128(x, dtype, columnwise, is_square, pow2, epsilon=0.0):
    return in_fp8(x, dtype, blocks(x, 128, columnwise, is_square), reaching_the_largest(pow2, epsilon))


def in_mxfp8(x, dtype, columnwise, is_square=False):
    return in_fp8(x, dtype, blocks(x, 32, columnwise, is_square), power_of_mxfp8)


def nearest_in_fp4(scaled):
    """The nearest numbers of FP4, of two the one with the even code."""
    distance = (scaled.double().abs().clamp(max=6).unsqueeze(-1) - FP4).abs()
    nearest = distance == distance.min(-1, keepdim=True).values
    return FP4[(nearest * torch.tensor([8, 1, 8, 1, 8, 1, 8, 1])).argmax(-1)].float() * scaled.sign()


def in_nvfp4(x, columnwise, is_square):
    source = x.detach().float()
    tensor = source.abs().max().double() if source.numel() else torch.tensor(0.0).double()
    encode = (2688 / tensor).float() if tensor != 0 else torch.tensor(1.0)
    per_amax, decode = encode * torch.tensor(1 / 6, dtype=torch.float32), (1 / encode.double()).float()
    result = torch.zeros(x.shape, dtype=torch.float64)
    for part in blocks(x, 16, columnwise, is_square):
        scale = (source[part].abs().max() * per_amax).clamp(max=448).to(E4M3).float()
        factor = (1 / (scale * decode).double()).float().clamp(max=torch.finfo(torch.float32).max)
        back = scale * tensor.float() * torch.tensor(1 / 2688, dtype=torch.float32)
        result[part] = (nearest_in_fp4(source[part] * factor) * back).double()
    return result


def in_nvfp4_by_four_or_six(x, columnwise, is_square, largest, squares):
    """The largest number of a block becomes 6 or 4, whichever errs less; errors are added in float64. `largest` is the largest scale of a block."""
    source = x.detach().float()
    amax = source.abs().max()
    encode = (torch.tensor(6.0 * largest).double() / amax.double()).float()
    decode, undo = (1 / encode.double()).float(), torch.tensor(1 / (6 * largest), dtype=torch.float32)
    result = torch.zeros(x.shape, dtype=torch.float64)
    for part in blocks(x, 16, columnwise, is_square):
        block = source[part]
        base = (block.abs().max().double() / 6).float() * encode
        tried = []
        for times in (1.0, 1.5):
            scale = (base * times).clamp(max=448).to(E4M3).float()
            codes = nearest_in_fp4(block * (1 / (scale * decode).double()).float())
            error = ((codes * scale * amax).double() / (6 * largest)).float().double() - block.double()
            tried.append(((error.square() if squares else error.abs()).sum().item(), codes * (scale * amax * undo)))
        six, four = tried
        result[part] = (four if four[0] < six[0] else six)[1].double()
    return result


def operand(recipe, role, x, columnwise):
    """x as a product under the recipe reads it; the role is "input", "weight" or "grad_output"."""
    if recipe.nvfp4():
        return in_nvfp4(x, columnwise, role == "weight" and not recipe.disable_2d_quantization)
    dtype = E5M2 if role == "grad_output" and recipe.fp8_format is Format.HYBRID else E4M3
    if recipe.mxfp8():
        return in_mxfp8(x, dtype, columnwise, role == "weight" and recipe.enable_2d_quantization)
    epsilon = getattr(recipe, f"amax_epsilon_{role}")
    if recipe.float8_current_scaling():
        return in_one_block(x, dtype, recipe.use_power_2_scales, epsilon)
    dim = {"input": recipe.x_block_scaling_dim, "weight": recipe.w_block_scaling_dim, "grad_output": recipe.grad_block_scaling_dim}[role]
    return in_blocks_of_128(x, dtype, columnwise, dim == 2, not recipe.use_f32_scales, epsilon)


def linear(recipe, x, weight, bias, grad):
    """y, and the gradients of x, of the weight and of the bias."""
    y = operand(recipe, "input", x, False) @ operand(recipe, "weight", weight, False).t() + bias.double()
    grad_x = operand(recipe, "grad_output", grad, False) @ operand(recipe, "weight", weight, True)
    grad_weight = operand(recipe, "grad_output", grad, True).t() @ operand(recipe, "input", x, True)
    return y, grad_x, grad_weight, grad.double().sum(0)
