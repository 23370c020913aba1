#include "kernel_ops/unit/activation_function.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <charconv>
#include <cmath>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/unit/activation_reference.h"

namespace tandem::kernel_ops {

using kernels::UnitNumbers;

/// An activation and its reference; for a unit with numbers also the factor of the gate.
struct ActivationRow {
  using Value = Tensor (*)(const Tensor& z, const UnitNumbers& numbers);
  using Grad = Tensor (*)(const Tensor& grad_y, const Tensor& z, const UnitNumbers& numbers);

  std::string_view name;
  Activation activation;
  Value value;
  Grad grad;
  Value other = nullptr;
  Grad other_grad = nullptr;
};

namespace {

template <size_t... kIndex>
constexpr auto activations(std::index_sequence<kIndex...>) {
  return std::array{ActivationRow{kernels::kActivationNames[kIndex], Activation{kIndex},
                                  [](const Tensor& z, const UnitNumbers&) {
                                    return ActivationReference<Activation{kIndex}>::value(z);
                                  },
                                  [](const Tensor& grad_y, const Tensor& z, const UnitNumbers&) {
                                    return ActivationReference<Activation{kIndex}>::grad(grad_y, z);
                                  }}...};
}
template <size_t... kIndex>
constexpr auto units(std::index_sequence<kIndex...>) {
  return std::array{ActivationRow{kernels::kNumberedUnits[kIndex].name,
                                  kernels::numbered_unit(kIndex),
                                  UnitReference<kernels::numbered_unit(kIndex)>::value,
                                  UnitReference<kernels::numbered_unit(kIndex)>::grad,
                                  UnitReference<kernels::numbered_unit(kIndex)>::other,
                                  UnitReference<kernels::numbered_unit(kIndex)>::other_grad}...};
}

const ActivationRow& row_of(std::string_view name, bool is_gated) {
  static constexpr auto kActivations = activations(kernels::ActivationIndices());
  static constexpr auto kUnits = units(kernels::NumberedUnitIndices());
  std::string names;
  const auto find = [&](const auto& rows) -> const ActivationRow* {
    for (const ActivationRow& row : rows)
      if (row.name == name) return &row;
    for (const ActivationRow& row : rows)
      names += (names.empty() ? "" : ", ") + std::string(row.name);
    return nullptr;
  };
  if (const ActivationRow* row = find(kActivations)) return *row;
  if (is_gated)
    if (const ActivationRow* row = find(kUnits)) return *row;
  TORCH_CHECK_VALUE(false, "activation: expected one of ", names, ", got \"", name,
                    "\". Use one of these or write the op in Python.");
}

/// The names of the numbers in the text of a row.
std::array<std::string_view, 3> numbers_of(const ActivationRow& row) {
  if (row.other == nullptr) return {};
  return kernels::kNumberedUnits[static_cast<size_t>(row.activation) -
                                 std::size(kernels::kActivationNames)]
      .numbers;
}

/// Takes ":name=number" from the front of `text`, if it is there.
template <typename T>
bool take(std::string_view& text, std::string_view name, T& number) {
  std::string_view rest = text;
  if (!rest.starts_with(':')) return false;
  rest.remove_prefix(1);
  if (!rest.starts_with(name)) return false;
  rest.remove_prefix(name.size());
  if (!rest.starts_with('=')) return false;
  rest.remove_prefix(1);
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  if (error != std::errc()) return false;
  text = rest.substr(static_cast<size_t>(end - rest.data()));
  return true;
}

[[noreturn]] void refuse(std::string_view text, const ActivationRow& row, bool is_gated) {
  std::string usage(row.name);
  for (const auto& name : numbers_of(row))
    if (!name.empty()) usage += ":" + std::string(name) + "=NUMBER";
  if (is_gated) usage += ", and behind it :interleave=COLUMNS where a and b are no halves";
  TORCH_CHECK_VALUE(false, "activation: expected ", usage, ", got \"", text,
                    "\". Write all finite numbers, in this order.");
}

/// The sizes of z with its last dimension split into alternating blocks of a and b.
c10::SymDimVector blocks_of(const Tensor& z, size_t block) {
  c10::SymDimVector sizes = sizes_of(z);
  const auto columns = static_cast<int64_t>(block);
  sizes.back() = sizes.back() / (2 * columns);
  sizes.push_back(2);
  sizes.push_back(columns);
  return sizes;
}

}  // namespace

ActivationFunction::ActivationFunction(std::string_view text, bool is_gated)
    : row_(&row_of(text.substr(0, text.find(':')), is_gated)), kernel_(row_->activation, is_gated) {
  std::string_view rest = text.substr(row_->name.size());
  bool is_whole = true;
  size_t place = 0;
  for (const auto& name : numbers_of(*row_)) {
    if (name.empty()) break;
    double& number = kernel_.numbers[place++];
    is_whole = is_whole && take(rest, name, number) && std::isfinite(number);
  }
  if (is_whole && is_gated && !rest.empty())
    is_whole = take(rest, "interleave", kernel_.interleave) && kernel_.interleave > 0 &&
               kernel_.interleave <= size_t{1} << 32;
  if (!is_whole || !rest.empty()) refuse(text, *row_, is_gated);
}

void ActivationFunction::check(std::string_view op, const Tensor& z) const {
  if (!kernel_.is_gated) return;
  check_even_last_dim(op, z);
  if (kernel_.interleave == 0) return;
  const auto both = static_cast<int64_t>(2 * kernel_.interleave);
  TORCH_CHECK_VALUE(z.sym_size(-1) % both == 0, op, ": expected x whose last dimension is a ",
                    "multiple of ", both, ", two blocks of glu_interleave_size, got ",
                    z.sym_sizes(), ". Change the features of the product before it, or the size.");
}

ResultSpec ActivationFunction::y_like(const Tensor& z, at::ScalarType dtype, bool wanted) const {
  ResultSpec y = like(z, dtype, wanted);
  if (kernel_.is_gated) y.sizes.back() = y.sizes.back() / 2;
  return y;
}

std::pair<Tensor, Tensor> ActivationFunction::parts(const Tensor& z) const {
  if (kernel_.interleave == 0) {
    const auto halves = z.chunk(2, -1);
    return {halves[0], halves[1]};
  }
  const Tensor blocks = z.reshape_symint(blocks_of(z, kernel_.interleave));
  const auto sizes = y_like(z, z.scalar_type()).sizes;
  return {blocks.select(-2, 0).reshape_symint(sizes), blocks.select(-2, 1).reshape_symint(sizes)};
}

Tensor ActivationFunction::value(const Tensor& z) const {
  const auto& numbers = kernel_.numbers;
  Tensor y;
  if (kernel_.is_gated) {
    const auto [a, b] = parts(z);
    y = row_->value(a, numbers) * (row_->other ? row_->other(b, numbers) : b);
  } else {
    y = row_->value(z, numbers);
  }
  TORCH_CHECK_TYPE(y.scalar_type() == z.scalar_type(), "activation: expected x of a dtype with ",
                   "fractions, as ", row_->name, " has, got ", dtype_name(z.scalar_type()),
                   ". Convert it before the call.");
  return y;
}

Tensor ActivationFunction::grad(const Tensor& grad_y, const Tensor& z) const {
  const auto& numbers = kernel_.numbers;
  if (!kernel_.is_gated) return row_->grad(grad_y, z, numbers);
  const auto [a, b] = parts(z);
  const Tensor other = row_->other ? row_->other(b, numbers) : b;
  const Tensor grad_a = row_->grad(grad_y * other, a, numbers);
  Tensor grad_b = grad_y * row_->value(a, numbers);
  if (row_->other_grad) grad_b = row_->other_grad(grad_b, b, numbers);
  if (kernel_.interleave == 0) return at::cat({grad_a, grad_b}, -1);
  c10::SymDimVector sizes = blocks_of(z, kernel_.interleave);
  sizes.erase(sizes.end() - 2);
  return at::stack({grad_a.reshape_symint(sizes), grad_b.reshape_symint(sizes)}, -2)
      .reshape_symint(z.sym_sizes());
}

}  // namespace tandem::kernel_ops
