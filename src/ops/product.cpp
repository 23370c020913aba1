#include "ops/product.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "core/overlap.h"
#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/product/codes_product.h"
#include "kernel_ops/quantize/quantize.h"

namespace tandem::ops {

namespace {

using kernel_ops::Product;
using kernel_ops::Rows;
using kernel_ops::Sums;

/// Creates a view without the dispatcher, because the direct path has only dense tensors without
/// subclasses.
at::Tensor raw_view(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::as_strided_tensorimpl(tensor, sizes, strides);
}

/// Returns `tensor` as a matrix over its last dimension, transposed where `transposed` is set.
at::Tensor matrix(const at::Tensor& tensor, bool transposed, Path path) {
  if (path != Path::direct) {
    const at::Tensor flat =
        tensor.dim() == 2
            ? tensor
            : tensor.reshape_symint({kernel_ops::rows_of(tensor), tensor.sym_size(-1)});
    return transposed ? flat.t() : flat;
  }
  const at::Tensor flat =
      tensor.dim() == 2 || tensor.is_contiguous() ? tensor : tensor.contiguous();
  const int64_t cols = flat.size(-1);
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < flat.dim(); ++d) rows *= flat.size(d);
  const int64_t row_stride = flat.dim() == 2 ? flat.stride(0) : cols,
                col_stride = flat.dim() == 2 ? flat.stride(1) : 1;
  if (transposed) return raw_view(flat, {cols, rows}, {col_stride, row_stride});
  return flat.dim() == 2 ? flat : raw_view(flat, {rows, cols}, {row_stride, col_stride});
}

/// A result that the frame allocates, and its view as a matrix.
struct Fresh {
  Fresh(Call& call, const Product& product, c10::SymIntArrayRef sizes)
      : tensor(call.frame().allocate(C10_AS_INTARRAYREF_SLOW(sizes), product.type.dtype,
                                     product.a.matrix)),
        matrix(tensor.dim() == 2 ? tensor
                                 : raw_view(tensor, {product.type.a.rows, product.type.b.cols},
                                            {product.type.b.cols, 1})) {}
  at::Tensor tensor, matrix;
};

/// Reshapes a product off the direct path. The reshape also restores a last dimension of one
/// column, which torch's product of two batched matrices drops from batched gradients
/// (is_grads_batched).
at::Tensor in_sizes(const at::Tensor& result, c10::SymIntArrayRef sizes) {
  return static_cast<size_t>(result.dim()) == sizes.size() ? result : result.reshape_symint(sizes);
}

std::optional<at::Tensor> optional(const at::Tensor* tensor) {
  return tensor != nullptr ? std::optional(*tensor) : std::nullopt;
}

/// Returns alpha a b + addend. An addend has the sizes and the dtype of the product, which is the
/// dtype of a and b or, with `is_wide`, float32 for operands of 16 bits.
at::Tensor multiply(Call& call, const at::Tensor& a, const at::Tensor& b, c10::SymIntArrayRef sizes,
                    Rows rows, Sums sums = Sums::any, double alpha = 1,
                    const at::Tensor* addend = nullptr, bool is_wide = false) {
  if (call.path() == Path::direct) {
    const Product product(
        a, b, is_wide ? at::kFloat : a.scalar_type(),
        {.rows = rows, .sums = sums, .alpha = alpha, .beta = addend != nullptr ? 1.0 : 0.0});
    Fresh result(call, product, sizes);
    if (addend != nullptr) result.tensor.copy_(*addend);
    call.took(kernel_ops::multiply(product, result.matrix));
    return std::move(result.tensor);
  }
  call.took(call.path() == Path::dispatch ? kernel_ops::kDispatcher : kernel_ops::kReference);
  if (addend == nullptr) {
    const at::Tensor product = is_wide ? at::mm(a.to(at::kFloat), b.to(at::kFloat)) : at::mm(a, b);
    return in_sizes(alpha == 1 ? product : at::mul(product, alpha), sizes);
  }
  const at::Tensor start =
      addend->dim() <= 2 ? *addend : addend->reshape_symint({a.sym_size(0), b.sym_size(1)});
  return in_sizes(at::addmm(start, a, b, /*beta=*/1, alpha), sizes);
}

/// Whether the product multiplies the parts of b where they lie. A sum over parts is rounded once
/// per part, so in 16 bits only the columns of a result may come from different parts.
bool reads_parts(const Call& call, const at::Tensor& a, Factor b) {
  return call.parts(b.read) != nullptr && call.like(b.read).scalar_type() == a.scalar_type() &&
         (b.transposed || !kernel_ops::is_narrow(a.scalar_type()));
}

/// Writes alpha a b to the matrix `result`, or adds it, for b in parts. A part gives some columns
/// of the result if b is transposed, else a term of each of its sums.
void multiply_parts(Call& call, const at::Tensor& a, Factor b, double alpha, bool accumulate,
                    const at::Tensor& result) {
  const auto columns = [](const at::Tensor& of, int64_t first, int64_t count) {
    return at::native::as_strided_tensorimpl(of, {of.size(0), count}, of.strides(),
                                             of.storage_offset() + first * of.stride(1));
  };
  int64_t first = 0;
  for (const at::Tensor& part : *call.parts(b.read)) {
    const int64_t count = part.size(0);
    const bool adds = accumulate || (!b.transposed && first != 0);
    const at::Tensor left = b.transposed ? a : columns(a, first, count),
                     right = matrix(part, b.transposed, Path::direct);
    const Product product(left, right, result.scalar_type(),
                          {.alpha = alpha, .beta = adds ? 1.0 : 0.0});
    call.took(kernel_ops::multiply(product, b.transposed ? columns(result, first, count) : result));
    first += count;
  }
}

/// Returns the tensor that a library can add to alpha a b so that nothing is left to do, or null:
/// the bias or the addend. A sum of both, and alpha times a bias, would be rounded before the
/// product. In float32 a separate addition of the bias is as precise, and takes one pass over
/// memory less.
const at::Tensor* addend_for_libraries(const Call& call, const Epilogue& epilogue,
                                       at::ScalarType dtype, c10::SymIntArrayRef sizes) {
  const auto& [alpha, bias, addend] = epilogue;
  if (!multiplies_by(alpha)) return nullptr;
  if (addend != nullptr && (addend->scalar_type() != dtype || addend->sym_sizes() != sizes))
    return nullptr;
  if (bias == nullptr) return addend;
  const bool is_for_later = call.path() == Path::direct && !kernel_ops::is_narrow(dtype);
  const bool is_alone = bias->scalar_type() == dtype && alpha == 1 && addend == nullptr;
  return is_alone && !is_for_later ? bias : nullptr;
}

/// Returns the dtype of the sum of a product and its addend.
at::ScalarType summed_dtype(const Epilogue& epilogue, at::ScalarType product) {
  return epilogue.addend == nullptr ? product
                                    : at::promote_types(product, epilogue.addend->scalar_type());
}

/// Applies the epilogue to a product. With `is_scaled` the product has alpha already.
at::Tensor finished(Call& call, at::Tensor product, const Epilogue& epilogue, at::ScalarType dtype,
                    bool is_scaled = false) {
  const auto& [alpha, bias, addend] = epilogue;
  if (alpha != 1 && !is_scaled) product = at::mul(product, alpha);
  if (bias == nullptr && addend == nullptr) return product;
  return call.run<kernel_ops::AddBias>({.x = product,
                                        .bias = optional(bias),
                                        .factor = alpha,
                                        .extra = optional(addend),
                                        .dtype = dtype},
                                       {product})[0];
}

/// Calls the kernel op of products of codes, which decodes the codes where it must.
at::Tensor dispatched_product_of_codes(Call& call, Factor a, Factor b, c10::SymIntArrayRef sizes,
                                       at::ScalarType dtype) {
  call.took(kernel_ops::kDispatcher);
  using kernel_ops::MultiplyCodes;
  const auto args = MultiplyCodes::of(call.operand(a.read), a.transposed, call.operand(b.read),
                                      b.transposed, dtype);
  return in_sizes(kernel_ops::dispatch<MultiplyCodes>(args)[0], sizes);
}

/// Returns the product of the codes themselves; undefined where no implementation multiplies them.
at::Tensor multiply_codes(Call& call, Factor a, Factor b, c10::SymIntArrayRef sizes,
                          at::ScalarType dtype, Rows rows) {
  if (call.path() == Path::dispatch) return dispatched_product_of_codes(call, a, b, sizes, dtype);
  if (call.path() != Path::direct) return {};
  const at::Tensor left = matrix(call.in(a.read), a.transposed, call.path()),
                   right = matrix(call.in(b.read), b.transposed, call.path());
  const Product product(call.operand(a.read).as(left), call.operand(b.read).as(right), dtype,
                        {.rows = rows, .sums = Sums::independent_of_threads});
  if (kernel_ops::choose(product) == nullptr) {
    call.took(kernel_ops::why_decoded(product));
    return {};
  }
  Fresh result(call, product, sizes);
  call.took(kernel_ops::multiply(product, result.matrix));
  return std::move(result.tensor);
}

/// An operand of a product of codes: its numbers in float32, and the scale that is applied to the
/// product, where the format has one.
struct Decoded {
  Decoded(Call& call, const CodedMatrix& codes)
      : quantizer(*codes.quantizer),
        values(call.run<kernel_ops::Decode>(kernel_ops::decoding(codes))[0]),
        scale(kernel_ops::scale_at_end(codes)) {}
  const Quantizer& quantizer;
  const at::Tensor values;
  const std::optional<at::Tensor> scale;
};

}  // namespace

void check_one_device(const Call& call, std::initializer_list<size_t> reads) {
  const size_t first = *reads.begin();
  for (const size_t read : reads)
    TORCH_CHECK_VALUE(!call.has(read) || call.like(read).device() == call.like(first).device(),
                      call.step().name, ": expected ", call.step().read_names[first], " and ",
                      call.step().read_names[read], " on one device, got ",
                      call.like(first).device(), " and ", call.like(read).device(),
                      ". Move the module or its input: both have .to(device).");
}

bool multiplies_by(double alpha) {
  const float factor = static_cast<float>(alpha);
  return factor != 0 && std::isfinite(factor);
}

at::Tensor product(Call& call, Factor a, Factor b, c10::SymIntArrayRef sizes, at::ScalarType dtype,
                   Epilogue epilogue) {
  check_one_device(call, {a.read, b.read});
  const Rows rows = a.transposed ? Rows::contracted : Rows::of_the_result;
  if (call.format(a.read) != Format::codes) {
    const at::Tensor left = matrix(call.in(a.read), a.transposed, call.path());
    const at::Tensor* addend = addend_for_libraries(call, epilogue, left.scalar_type(), sizes);
    const bool is_scaled = multiplies_by(epilogue.alpha);
    const at::ScalarType own = summed_dtype(epilogue, left.scalar_type());
    // An epilogue after the product gets unrounded float32 sums, so that the step rounds once. Only
    // CPUs do so; other devices multiply several times slower in float32.
    const bool is_followed = addend == nullptr && (epilogue.bias || epilogue.addend);
    const bool is_wide = is_followed && kernel_ops::is_narrow(own) && left.device().is_cpu();
    const double alpha = is_scaled ? epilogue.alpha : 1;
    at::Tensor result;
    if (reads_parts(call, left, b)) {
      result = call.frame().allocate(C10_AS_INTARRAYREF_SLOW(sizes),
                                     is_wide ? at::kFloat : left.scalar_type(), left);
      if (addend != nullptr) result.copy_(*addend);
      multiply_parts(call, left, b, alpha, addend != nullptr,
                     matrix(result, /*transposed=*/false, Path::direct));
    } else {
      result = multiply(call, left, matrix(call.in(b.read), b.transposed, call.path()), sizes, rows,
                        Sums::any, alpha, addend, is_wide);
    }
    if (addend != nullptr) return result;
    return finished(call, std::move(result), epilogue, own, is_scaled);
  }
  // The epilogue gets the sums without a rounding to `dtype`.
  const bool adds = epilogue.bias != nullptr || epilogue.addend != nullptr;
  const at::ScalarType of_product = adds ? at::promote_types(dtype, at::kFloat) : dtype;
  const at::ScalarType own = summed_dtype(epilogue, dtype);
  if (at::Tensor result = multiply_codes(call, a, b, sizes, of_product, rows); result.defined())
    return finished(call, result, epilogue, own);
  const Decoded first(call, call.operand(a.read)), second(call, call.operand(b.read));
  at::Tensor left = matrix(first.values, a.transposed, call.path()),
             right = matrix(second.values, b.transposed, call.path());
  kernel_ops::cut_padding(left, first.quantizer, right, second.quantizer);
  at::Tensor result = multiply(call, left, right, sizes, rows, Sums::independent_of_threads);
  if (first.scale || second.scale || of_product != result.scalar_type())
    result = call.run<kernel_ops::ScaleProduct>({.product = result,
                                                 .a_scale = first.scale,
                                                 .b_scale = second.scale,
                                                 .dtype = of_product})[0];
  return finished(call, result, epilogue, own);
}

void product_into(Call& call, Factor a, Factor b, const at::Tensor& target, bool accumulate,
                  double alpha) {
  check_one_device(call, {a.read, b.read});
  const auto put = [&](const at::Tensor& result) {
    if (accumulate) {
      target.add_(result, alpha);
    } else {
      target.copy_(alpha == 1 ? result : at::mul(result, alpha));
    }
  };
  if (call.format(a.read) == Format::codes) {
    const c10::SymInt sizes[] = {target.sym_size(0), target.sym_size(1)};
    return put(product(call, a, b, sizes, at::kFloat));
  }
  const auto operand =
      [&](Factor factor) {  // exact in the wider dtype, and so is the sum's only rounding
        const at::Tensor& tensor = call.in(factor.read);
        const at::ScalarType wide = at::promote_types(tensor.scalar_type(), target.scalar_type());
        return matrix(tensor.to(wide), factor.transposed, call.path());
      };
  const at::Tensor left = operand(a);
  const bool is_same = left.scalar_type() == target.scalar_type();
  const bool is_direct = call.path() == Path::direct && is_same && target.is_contiguous() &&
                         kernel_ops::is_plain(target) && target.device() == left.device();
  if (is_direct && reads_parts(call, left, b))
    return multiply_parts(call, left, b, alpha, accumulate, target);
  const at::Tensor right = operand(b);
  if (is_direct) {
    const Product product(left, right, target.scalar_type(),
                          {.rows = a.transposed ? Rows::contracted : Rows::of_the_result,
                           .alpha = alpha,
                           .beta = accumulate ? 1.0 : 0.0});
    call.took(kernel_ops::multiply(product, target));
    return;
  }
  call.took(call.path() == Path::dispatch ? kernel_ops::kDispatcher : kernel_ops::kReference);
  if (!is_same) {
    put(at::mm(left, right));
  } else {
    target.addmm_(left, right, /*beta=*/accumulate ? 1 : 0, alpha);
  }
}

void check_own_memory(Call& call, const char* op, const char* name, const at::Tensor& target) {
  if (call.path() != Path::direct || !kernel_ops::is_plain(target)) return;
  for (const Value value : call.step().reads) {
    if (!exists(value)) continue;
    for (const at::Tensor& read : call.frame().tensors(value)) {
      TORCH_CHECK_VALUE(!read.defined() || !overlap(target, read), op,
                        ": expected memory of its own for ", name, ", got that of ",
                        call.frame().type(value).name,
                        ", which is read while it is written. Allocate it by itself.");
    }
  }
}

c10::SymDimVector output_sizes(const at::Tensor& x, const at::Tensor& weight) {
  c10::SymDimVector sizes = kernel_ops::sizes_of(x);
  sizes.back() = weight.sym_size(0);
  return sizes;
}

void check_linear(const Call& call, size_t x, size_t weight) {
  const c10::SymDimVector input = call.sizes_of_numbers(x), matrix = call.sizes_of_numbers(weight);
  TORCH_CHECK_VALUE(matrix.size() == 2,
                    "linear: expected weight of shape [out_features, in_features], got ",
                    c10::SymIntArrayRef(matrix), ". Pass a matrix.");
  TORCH_CHECK_VALUE(!input.empty() && input.back() == matrix[1], "linear: expected x with ",
                    matrix[1], " features in its last dimension, as weight ",
                    c10::SymIntArrayRef(matrix), " has, got x of shape ",
                    c10::SymIntArrayRef(input), ". Build the op with in_features=",
                    input.empty() ? c10::SymInt(1) : input.back(), " or reshape x.");
}

at::Tensor linear_product(Call& call, size_t x, size_t weight, at::ScalarType dtype,
                          Epilogue epilogue) {
  check_linear(call, x, weight);
  return product(call, {x}, {weight, true}, output_sizes(call.in(x), call.like(weight)), dtype,
                 epilogue);
}

ProductAndUnit linear_product_and(Call& call, size_t x, size_t weight, at::ScalarType dtype,
                                  const BehindProduct& behind) {
  check_linear(call, x, weight);
  check_one_device(call, {x, weight});
  const at::Tensor left = matrix(call.in(x), false, call.path()),
                   right = matrix(call.in(weight), true, call.path());
  const bool is_quantized = call.format(x) == Format::codes;
  c10::SymDimVector sizes = output_sizes(call.in(x), call.in(weight));
  const auto allocate = [&] {
    return call.frame().allocate(C10_AS_INTARRAYREF_SLOW(sizes), dtype, left);
  };
  const auto as_matrix = [](const at::Tensor& tensor) {
    return tensor.view({-1, tensor.size(-1)});
  };
  kernel_ops::ProductOptions options{
      .sums = is_quantized ? Sums::independent_of_threads : Sums::any,
      .bias = behind.bias ? &*behind.bias : nullptr,
      .unit = behind.unit,
      .is_gated = behind.is_gated,
      .unit_argument = behind.wants_z ? &left : nullptr};  // only whether this is null counts here
  const auto product = [&] {
    return Product(call.operand(x).as(left), call.operand(weight).as(right), dtype, options);
  };
  if (kernel_ops::choose(product()) == nullptr) return {};
  ProductAndUnit made{.y = {}, .z = behind.wants_z ? allocate() : at::Tensor()};
  const at::Tensor z = made.z.defined() ? as_matrix(made.z) : at::Tensor();
  if (z.defined()) options.unit_argument = &z;
  if (behind.is_gated) sizes.back() = sizes.back() / 2;
  made.y = allocate();
  call.took(kernel_ops::multiply(product(), as_matrix(made.y)));
  return made;
}

at::Tensor linear_grad_x(Call& call, size_t grad_y, size_t weight, at::ScalarType dtype,
                         Epilogue epilogue) {
  c10::SymDimVector sizes = kernel_ops::sizes_of(call.in(grad_y));
  sizes.back() = call.like(weight).sym_size(1);
  return product(call, {grad_y}, {weight}, sizes, dtype, epilogue);
}

at::Tensor linear_grad_weight(Call& call, size_t grad_y, size_t x, at::ScalarType dtype,
                              Epilogue epilogue) {
  const c10::SymInt sizes[] = {call.in(grad_y).sym_size(-1), call.in(x).sym_size(-1)};
  return product(call, {grad_y, true}, {x}, sizes, dtype, epilogue);
}

}  // namespace tandem::ops
