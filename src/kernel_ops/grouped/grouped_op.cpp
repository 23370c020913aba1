// Products of groups of rows through the dispatcher, and in differentiable operations.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>

#include "kernel_ops/framework/memory.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/grouped/grouped.h"

namespace tandem::kernel_ops {

using at::Tensor;

namespace composite {

Tensor grouped_product(const Tensor& x, const Tensor& splits, at::TensorList matrices,
                       at::TensorList biases, const std::optional<Tensor>& scales,
                       bool transposed) {
  const auto offsets = group_offsets(splits, static_cast<int64_t>(matrices.size()), x.size(0));
  std::vector<Tensor> parts;
  for (size_t g = 0; g < matrices.size(); ++g) {
    const int64_t first = offsets[g], count = offsets[g + 1] - first;
    const Tensor rows = x.narrow(0, first, count);
    const Tensor matrix = transposed ? matrices[g].t() : matrices[g];
    if (biases.empty()) {
      parts.push_back(at::mm(rows, matrix));
    } else if (scales) {
      const Tensor own = scales->narrow(0, first, count).unsqueeze(1);
      parts.push_back(at::addmm(own * biases[g], rows, matrix));
    } else {
      parts.push_back(at::addmm(biases[g], rows, matrix));
    }
  }
  parts.push_back(
      at::zeros({x.size(0) - offsets.back(), matrices[0].size(transposed ? 0 : 1)}, x.options()));
  return at::cat(parts);
}

namespace {

template <typename Part>
std::vector<Tensor> by_group(const Tensor& splits, int64_t groups, int64_t rows, Part&& part) {
  const auto offsets = group_offsets(splits, groups, rows);
  std::vector<Tensor> parts;
  for (size_t g = 0; g + 1 < offsets.size(); ++g)
    parts.push_back(part(g, offsets[g], offsets[g + 1] - offsets[g]));
  return parts;
}

Tensor grad_weight(const Tensor& grad_y, const Tensor& x, const Tensor& splits, int64_t groups) {
  return at::stack(by_group(splits, groups, x.size(0), [&](size_t, int64_t first, int64_t rows) {
    return at::mm(grad_y.narrow(0, first, rows).t(), x.narrow(0, first, rows));
  }));
}

Tensor grad_bias(const Tensor& grad_y, const Tensor& splits, const std::optional<Tensor>& scales,
                 int64_t groups) {
  const Tensor terms = scales ? at::mul(grad_y, scales->unsqueeze(1)) : grad_y;
  return at::stack(
      by_group(splits, groups, grad_y.size(0), [&](size_t, int64_t first, int64_t rows) {
        return terms.narrow(0, first, rows)
            .sum(0, /*keepdim=*/false, wide(grad_y.scalar_type()))
            .to(grad_y.scalar_type());
      }));
}

Tensor grad_scales(const Tensor& grad_y, const Tensor& splits, at::TensorList biases) {
  auto parts = by_group(splits, static_cast<int64_t>(biases.size()), grad_y.size(0),
                        [&](size_t g, int64_t first, int64_t rows) {
                          return at::mv(grad_y.narrow(0, first, rows), biases[g]);
                        });
  int64_t rows = grad_y.size(0);
  for (const Tensor& part : parts) rows -= part.size(0);
  parts.push_back(at::zeros({rows}, grad_y.options()));
  return at::cat(parts);
}

}  // namespace
}  // namespace composite

namespace {

const Quantizer* quantizer_or_null(std::string_view text) {
  return text.empty() ? nullptr : &quantizer(text);
}
std::string_view text_of(const Quantizer* quantizer) {
  return quantizer == nullptr ? std::string_view() : std::string_view(quantizer->text);
}

bool needs_grad(const Tensor& tensor) { return tensor.requires_grad(); }
bool needs_grad(const std::optional<Tensor>& tensor) { return tensor && tensor->requires_grad(); }
bool needs_grad(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const Tensor& tensor) { return tensor.requires_grad(); });
}
template <typename T>
bool needs_grad(const T&) {
  return false;
}

void check_no_gradient(std::initializer_list<std::string_view> quantizers) {
  for (const std::string_view text : quantizers)
    TORCH_CHECK_NOT_IMPLEMENTED(
        text.empty(), "grouped_linear: expected tensors that need no gradient for quantized ",
        "products, got one that requires it. Call them inside a pipeline, or detach it.");
}

/// Each op of the dispatcher: `run` computes, `shapes` tells what, `composite` is differentiated
/// where the op is called by itself.
struct ProductOp {
  static constexpr const char* kName = "tandem::grouped_product";
  static constexpr const char* kSchema =
      "grouped_product(Tensor x, Tensor splits, Tensor[] matrices, Tensor[] biases, Tensor? "
      "scales, bool transposed, str quantizer, Tensor[] matrix_scales, Tensor[] "
      "matrix_amaxes, str matrix_quantizer, Tensor? given=None, Tensor? matrix_given=None) -> "
      "Tensor";
  static Tensor run(const Tensor& x, const Tensor& splits, at::TensorList matrices,
                    at::TensorList biases, const std::optional<Tensor>& scales, bool transposed,
                    std::string_view quantizer, at::TensorList matrix_scales,
                    at::TensorList matrix_amaxes, std::string_view matrix_quantizer,
                    const std::optional<Tensor>& given, const std::optional<Tensor>& matrix_given) {
    const auto offsets = group_offsets(splits, static_cast<int64_t>(matrices.size()), x.size(0));
    const Tensor y =
        empty_beside(x, {x.size(0), matrices[0].size(transposed ? 0 : 1)}, x.scalar_type());
    product_of_groups(x, offsets,
                      {matrices.vec(),
                       matrix_scales.vec(),
                       matrix_amaxes.vec(),
                       {quantizer_or_null(matrix_quantizer), matrix_given}},
                      {biases.vec(), scales}, transposed, {quantizer_or_null(quantizer), given}, y);
    return y;
  }
  static Tensor shapes(const Tensor& x, const Tensor& /*splits*/, at::TensorList matrices,
                       at::TensorList /*biases*/, const std::optional<Tensor>& /*scales*/,
                       bool transposed, std::string_view /*quantizer*/,
                       at::TensorList /*matrix_scales*/, at::TensorList /*matrix_amaxes*/,
                       std::string_view /*matrix_quantizer*/,
                       const std::optional<Tensor>& /*given*/,
                       const std::optional<Tensor>& /*matrix_given*/) {
    return at::empty_symint({x.sym_size(0), matrices[0].sym_size(transposed ? 0 : 1)}, x.options());
  }
  static Tensor composite(const Tensor& x, const Tensor& splits, at::TensorList matrices,
                          at::TensorList biases, const std::optional<Tensor>& scales,
                          bool transposed, std::string_view quantizer,
                          at::TensorList /*matrix_scales*/, at::TensorList /*matrix_amaxes*/,
                          std::string_view matrix_quantizer, const std::optional<Tensor>& /*given*/,
                          const std::optional<Tensor>& /*matrix_given*/) {
    check_no_gradient({quantizer, matrix_quantizer});
    return composite::grouped_product(x, splits, matrices, biases, scales, transposed);
  }
};

struct GradWeightOp {
  static constexpr const char* kName = "tandem::grouped_grad_weight";
  static constexpr const char* kSchema =
      "grouped_grad_weight(Tensor grad_y, Tensor x, Tensor splits, int groups, str "
      "grad_quantizer='', str quantizer='', Tensor? grad_given=None, Tensor? given=None) -> Tensor";
  static Tensor run(const Tensor& grad_y, const Tensor& x, const Tensor& splits, int64_t groups,
                    std::string_view grad_quantizer, std::string_view quantizer,
                    const std::optional<Tensor>& grad_given, const std::optional<Tensor>& given) {
    const GradQuantizers quantizers{{quantizer_or_null(grad_quantizer), grad_given},
                                    {quantizer_or_null(quantizer), given}};
    const auto offsets = group_offsets(splits, groups, x.size(0));
    const Tensor all = empty_beside(x, {groups, grad_y.size(1), x.size(1)}, x.scalar_type());
    for_each_group(offsets, [&](size_t g) {
      grad_weight_of_group(rows_between(grad_y, offsets[g], offsets[g + 1]),
                           rows_between(x, offsets[g], offsets[g + 1]), quantizers, g,
                           all.select(0, static_cast<int64_t>(g)), /*accumulate=*/false);
    });
    for (size_t g = 0; g + 1 < offsets.size(); ++g)
      if (offsets[g] == offsets[g + 1]) all.select(0, static_cast<int64_t>(g)).zero_();
    return all;
  }
  static Tensor shapes(const Tensor& grad_y, const Tensor& x, const Tensor& /*splits*/,
                       int64_t groups, std::string_view /*grad_quantizer*/,
                       std::string_view /*quantizer*/, const std::optional<Tensor>& /*grad_given*/,
                       const std::optional<Tensor>& /*given*/) {
    return at::empty_symint({groups, grad_y.sym_size(1), x.sym_size(1)}, x.options());
  }
  static Tensor composite(const Tensor& grad_y, const Tensor& x, const Tensor& splits,
                          int64_t groups, std::string_view grad_quantizer,
                          std::string_view quantizer, const std::optional<Tensor>& /*grad_given*/,
                          const std::optional<Tensor>& /*given*/) {
    check_no_gradient({grad_quantizer, quantizer});
    return composite::grad_weight(grad_y, x, splits, groups);
  }
};

struct GradBiasOp {
  static constexpr const char* kName = "tandem::grouped_grad_bias";
  static constexpr const char* kSchema =
      "grouped_grad_bias(Tensor grad_y, Tensor splits, Tensor? scales, int groups) -> Tensor";
  static Tensor run(const Tensor& grad_y, const Tensor& splits, const std::optional<Tensor>& scales,
                    int64_t groups) {
    const auto offsets = group_offsets(splits, groups, grad_y.size(0));
    const Tensor all = empty_beside(grad_y, {groups, grad_y.size(1)}, grad_y.scalar_type());
    for (size_t g = 0; g + 1 < offsets.size(); ++g) {
      std::optional<Tensor> own;
      if (scales) own = rows_between(*scales, offsets[g], offsets[g + 1]);
      grad_bias_of_group(rows_between(grad_y, offsets[g], offsets[g + 1]), own,
                         all.select(0, static_cast<int64_t>(g)));
    }
    return all;
  }
  static Tensor shapes(const Tensor& grad_y, const Tensor& /*splits*/,
                       const std::optional<Tensor>& /*scales*/, int64_t groups) {
    return at::empty_symint({groups, grad_y.sym_size(1)}, grad_y.options());
  }
  static constexpr auto composite = &composite::grad_bias;
};

struct AmaxesOp {
  static constexpr const char* kName = "tandem::grouped_amaxes";
  static constexpr const char* kSchema =
      "grouped_amaxes(Tensor x, Tensor? splits, int groups) -> Tensor";
  static Tensor run(const Tensor& x, const std::optional<Tensor>& splits, int64_t groups) {
    const auto offsets = splits ? group_offsets(*splits, groups, x.size(0)) : one_each(x, groups);
    const Tensor amaxes = at::zeros({groups}, x.options().dtype(at::kFloat));
    for_each_group(offsets, [&](size_t g) {
      amaxes.select(0, static_cast<int64_t>(g))
          .copy_(amax_of_rows(rows_between(x, offsets[g], offsets[g + 1])));
    });
    return amaxes;
  }
  static Tensor shapes(const Tensor& x, const std::optional<Tensor>& /*splits*/, int64_t groups) {
    return at::empty({groups}, x.options().dtype(at::kFloat));
  }
  static Tensor composite(const Tensor& x, const std::optional<Tensor>& splits, int64_t groups) {
    return run(x.detach(), splits, groups).detach();
  }

 private:
  static std::vector<int64_t> one_each(const Tensor& x, int64_t groups) {
    TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(0) == groups, "grouped_amaxes: expected matrices [",
                      groups, ", ...], got ", x.sizes(), ". Pass one for each group.");
    std::vector<int64_t> offsets(static_cast<size_t>(groups) + 1);
    for (size_t g = 0; g < offsets.size(); ++g) offsets[g] = static_cast<int64_t>(g);
    return offsets;
  }
};

struct GradScalesOp {
  static constexpr const char* kName = "tandem::grouped_grad_scales";
  static constexpr const char* kSchema =
      "grouped_grad_scales(Tensor grad_y, Tensor splits, Tensor[] biases) -> Tensor";
  static Tensor run(const Tensor& grad_y, const Tensor& splits, at::TensorList biases) {
    const auto offsets = group_offsets(splits, static_cast<int64_t>(biases.size()), grad_y.size(0));
    const Tensor all = empty_beside(grad_y, {grad_y.size(0)}, grad_y.scalar_type());
    for (size_t g = 0; g + 1 < offsets.size(); ++g)
      if (offsets[g] != offsets[g + 1])
        grad_scales_of_group(rows_between(grad_y, offsets[g], offsets[g + 1]), biases[g],
                             rows_between(all, offsets[g], offsets[g + 1]));
    rows_between(all, offsets.back(), all.size(0)).zero_();
    return all;
  }
  static Tensor shapes(const Tensor& grad_y, const Tensor& /*splits*/, at::TensorList /*biases*/) {
    return at::empty_symint({grad_y.sym_size(0)}, grad_y.options());
  }
  static constexpr auto composite = &composite::grad_scales;
};

template <typename Op, typename... Given>
Tensor call(const Given&... given) {
  using Function = std::remove_pointer_t<decltype(&Op::run)>;
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow(Op::kName, "").template typed<Function>();
  return handle.call(given...);
}

/// Called by itself an op is differentiated as its composite form is.
template <typename Op, typename Function>
struct Autograd;
template <typename Op, typename... Args>
struct Autograd<Op, Tensor (*)(Args...)> {
  static Tensor run(c10::DispatchKeySet /*keys*/, Args... args) {
    if (c10::GradMode::is_enabled() && (needs_grad(args) || ...)) return Op::composite(args...);
    at::AutoDispatchBelowADInplaceOrView below;
    return call<Op>(args...);
  }
};

template <typename Op>
void add_op(torch::Library& library) {
  const std::string_view name = Op::kName;
  const char* unqualified = Op::kName + name.rfind(':') + 1;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  library.def(Op::kSchema, tags);
  library.impl(unqualified, c10::DispatchKey::CompositeExplicitAutograd, &Op::run);
  library.impl(unqualified, c10::DispatchKey::Meta, &Op::shapes);
  library.impl(unqualified, c10::DispatchKey::Autograd, &Autograd<Op, decltype(&Op::run)>::run);
}

}  // namespace

Tensor grouped_product(const Tensor& x, const Tensor& splits, const GroupMatrices& matrices,
                       const GroupBiases& biases, bool transposed,
                       const GroupQuantizer& quantizer) {
  return call<ProductOp>(x, splits, at::TensorList(matrices.matrices),
                         at::TensorList(biases.biases), biases.scales, transposed,
                         text_of(quantizer.quantizer), at::TensorList(matrices.scales),
                         at::TensorList(matrices.amaxes), text_of(matrices.quantizer.quantizer),
                         quantizer.given, matrices.quantizer.given);
}
Tensor grouped_grad_weight(const Tensor& grad_y, const Tensor& x, const Tensor& splits,
                           int64_t groups, const GradQuantizers& quantizers) {
  return call<GradWeightOp>(grad_y, x, splits, groups, text_of(quantizers.grad_y.quantizer),
                            text_of(quantizers.x.quantizer), quantizers.grad_y.given,
                            quantizers.x.given);
}
Tensor grouped_grad_bias(const Tensor& grad_y, const Tensor& splits,
                         const std::optional<Tensor>& scales, int64_t groups) {
  return call<GradBiasOp>(grad_y, splits, scales, groups);
}
Tensor grouped_amaxes(const Tensor& rows, const Tensor& splits, int64_t groups) {
  return call<AmaxesOp>(rows, std::optional(splits), groups);
}
Tensor matrix_amaxes(const Tensor& matrices) {
  return call<AmaxesOp>(matrices, std::optional<Tensor>(), matrices.size(0));
}
Tensor grouped_grad_scales(const Tensor& grad_y, const Tensor& splits, at::TensorList biases) {
  return call<GradScalesOp>(grad_y, splits, biases);
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  add_op<ProductOp>(library);
  add_op<GradWeightOp>(library);
  add_op<GradBiasOp>(library);
  add_op<AmaxesOp>(library);
  add_op<GradScalesOp>(library);
}

}  // namespace tandem::kernel_ops
