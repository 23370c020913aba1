#include "kernel_ops/grouped.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "kernel_ops/memory.h"
#include "kernel_ops/shapes.h"

namespace tandem::kernel_ops {

using at::Tensor;

namespace composite {

Tensor grouped_product(const Tensor& x, const Tensor& splits, at::TensorList matrices,
                       at::TensorList biases, bool transposed) {
  const auto offsets = group_offsets(splits, static_cast<int64_t>(matrices.size()), x.size(0));
  std::vector<Tensor> parts;
  for (size_t g = 0; g < matrices.size(); ++g) {
    const Tensor rows = x.narrow(0, offsets[g], offsets[g + 1] - offsets[g]);
    const Tensor matrix = transposed ? matrices[g].t() : matrices[g];
    parts.push_back(biases.empty() ? at::mm(rows, matrix) : at::addmm(biases[g], rows, matrix));
  }
  parts.push_back(
      at::zeros({x.size(0) - offsets.back(), matrices[0].size(transposed ? 0 : 1)}, x.options()));
  return at::cat(parts);
}

namespace {

Tensor grad_weight(const Tensor& grad_y, const Tensor& x, const Tensor& splits, int64_t groups) {
  const auto offsets = group_offsets(splits, groups, x.size(0));
  std::vector<Tensor> parts;
  for (size_t g = 0; g + 1 < offsets.size(); ++g) {
    const int64_t first = offsets[g], rows = offsets[g + 1] - first;
    parts.push_back(at::mm(grad_y.narrow(0, first, rows).t(), x.narrow(0, first, rows)));
  }
  return at::stack(parts);
}

Tensor sum_rows(const Tensor& grad_y, const Tensor& splits, int64_t groups) {
  const auto offsets = group_offsets(splits, groups, grad_y.size(0));
  std::vector<Tensor> parts;
  for (size_t g = 0; g + 1 < offsets.size(); ++g)
    parts.push_back(grad_y.narrow(0, offsets[g], offsets[g + 1] - offsets[g])
                        .sum(0, /*keepdim=*/false, wide(grad_y.scalar_type()))
                        .to(grad_y.scalar_type()));
  return at::stack(parts);
}

}  // namespace
}  // namespace composite

namespace {

namespace shapes {

Tensor product(const Tensor& x, const Tensor& /*splits*/, at::TensorList matrices,
               at::TensorList /*biases*/, bool transposed) {
  return at::empty_symint({x.sym_size(0), matrices[0].sym_size(transposed ? 0 : 1)}, x.options());
}
Tensor grad_weight(const Tensor& grad_y, const Tensor& x, const Tensor& /*splits*/,
                   int64_t groups) {
  return at::empty_symint({groups, grad_y.sym_size(1), x.sym_size(1)}, x.options());
}
Tensor sum_rows(const Tensor& grad_y, const Tensor& /*splits*/, int64_t groups) {
  return at::empty_symint({groups, grad_y.sym_size(1)}, grad_y.options());
}

}  // namespace shapes

template <typename Function>
struct Op;
template <typename... Args>
struct Op<Tensor(Args...)> {
  /// Through the dispatcher, which is what lets tracing, modes and subclasses see it.
  template <typename... Given>
  static Tensor call(const char* name, const Given&... given) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(name, "")
        .template typed<Tensor(Args...)>()
        .call(given...);
  }
};

bool needs_grad(const Tensor& tensor) { return tensor.requires_grad(); }
bool needs_grad(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const Tensor& tensor) { return tensor.requires_grad(); });
}
template <typename T>
bool needs_grad(const T&) {
  return false;
}

/// Called by itself an op is differentiated as its composite form is.
template <auto kComposite, typename Function>
struct Autograd;
template <auto kComposite, typename... Args>
struct Autograd<kComposite, Tensor (*)(Args...)> {
  static Tensor run(c10::DispatchKeySet /*keys*/, Args... args) {
    if (c10::GradMode::is_enabled() && (needs_grad(args) || ...)) return kComposite(args...);
    at::AutoDispatchBelowADInplaceOrView below;
    if constexpr (std::is_same_v<Tensor (*)(Args...), decltype(&grouped_product)>)
      return grouped_product(args...);
    else if constexpr (std::is_same_v<Tensor (*)(Args...), decltype(&grouped_grad_weight)>)
      return grouped_grad_weight(args...);
    else
      return grouped_sum_rows(args...);
  }
};

template <auto kComposite>
constexpr auto autograd = &Autograd<kComposite, decltype(kComposite)>::run;

}  // namespace

std::vector<int64_t> group_offsets(const Tensor& splits, int64_t groups, int64_t rows) {
  TORCH_CHECK_TYPE(c10::isIntegralType(splits.scalar_type(), /*includeBool=*/false),
                   "grouped_linear: expected splits that are integers, got ", splits.scalar_type(),
                   ". Pass the number of rows of each group as an int64 tensor.");
  TORCH_CHECK_VALUE(splits.numel() == groups, "grouped_linear: expected splits of shape [", groups,
                    "], one number per group, got ", splits.sizes(),
                    ". Pass the number of rows of each group.");
  const bool is_readable =
      is_on_host(splits) && is_plain(splits) && splits.scalar_type() == at::kLong;
  const Tensor counts = is_readable ? splits : splits.to(at::kCPU, at::kLong);
  std::vector<int64_t> offsets{0};
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t count =
        is_readable ? counts.const_data_ptr<int64_t>()[g * counts.stride(0)]
                    : counts.select(0, g).item<int64_t>();  // a transform's tensor has no memory
    TORCH_CHECK_VALUE(count >= 0 && count <= rows - offsets.back(),
                      "grouped_linear: expected splits >= 0 whose sum is at most the ", rows,
                      " rows of x, got ", count, " for group ", g, " behind ", offsets.back(),
                      " rows. Count the rows of each group.");
    offsets.push_back(offsets.back() + count);
  }
  return offsets;
}

Tensor grouped_product(const Tensor& x, const Tensor& splits, at::TensorList matrices,
                       at::TensorList biases, bool transposed) {
  return Op<decltype(composite::grouped_product)>::call("tandem::grouped_product", x, splits,
                                                        matrices, biases, transposed);
}
Tensor grouped_grad_weight(const Tensor& grad_y, const Tensor& x, const Tensor& splits,
                           int64_t groups) {
  return Op<decltype(composite::grad_weight)>::call("tandem::grouped_grad_weight", grad_y, x,
                                                    splits, groups);
}
Tensor grouped_sum_rows(const Tensor& grad_y, const Tensor& splits, int64_t groups) {
  return Op<decltype(composite::sum_rows)>::call("tandem::grouped_sum_rows", grad_y, splits,
                                                 groups);
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  library.def(
      "grouped_product(Tensor x, Tensor splits, Tensor[] matrices, Tensor[] biases, bool "
      "transposed) -> Tensor",
      tags);
  library.def("grouped_grad_weight(Tensor grad_y, Tensor x, Tensor splits, int groups) -> Tensor",
              tags);
  library.def("grouped_sum_rows(Tensor grad_y, Tensor splits, int groups) -> Tensor", tags);
  const auto add = [&](const char* name, auto* composite, auto* shape, auto* autograd) {
    library.impl(name, c10::DispatchKey::CompositeExplicitAutograd, composite);
    library.impl(name, c10::DispatchKey::Meta, shape);
    library.impl(name, c10::DispatchKey::Autograd, autograd);
  };
  add("grouped_product", &composite::grouped_product, &shapes::product,
      autograd<&composite::grouped_product>);
  add("grouped_grad_weight", &composite::grad_weight, &shapes::grad_weight,
      autograd<&composite::grad_weight>);
  add("grouped_sum_rows", &composite::sum_rows, &shapes::sum_rows, autograd<&composite::sum_rows>);
}

}  // namespace tandem::kernel_ops
