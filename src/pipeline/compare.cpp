#include "pipeline/compare.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>

#include <limits>
#include <sstream>

namespace tandem {

namespace {

/// The largest number, the distance from 1 to the next one, and the smallest normal one.
struct Limits {
  double largest, unit, smallest_normal;
};

template <typename T>
Limits limits_of_type() {
  using Of = std::numeric_limits<T>;
  return {static_cast<double>(Of::max()), static_cast<double>(Of::epsilon()),
          static_cast<double>(Of::min())};
}

Limits limits_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return limits_of_type<c10::Half>();
    case at::kBFloat16:
      return limits_of_type<c10::BFloat16>();
    case at::kFloat:
    case at::kComplexFloat:
      return limits_of_type<float>();
    case at::kDouble:
    case at::kComplexDouble:
      return limits_of_type<double>();
    default:
      return {limits_of_type<double>().largest, 0, limits_of_type<double>().smallest_normal};
  }
}

std::string described(const at::Tensor& tensor) {
  std::ostringstream text;
  if (!tensor.defined()) return "none";
  text << c10::toString(tensor.scalar_type()) << ' ' << tensor.sizes();
  return text.str();
}

std::string expected_got(const std::string& expected, const std::string& got) {
  return "expected " + expected + ", got " + got;
}

/// Both tensors in float64, with NaN removed and infinities replaced by the dtype's largest number.
/// `problem`: why that is not possible, or empty.
struct Numbers {
  at::Tensor got, expected;
  std::string problem;
};

Numbers numbers_of(const at::Tensor& got, const at::Tensor& expected) {
  if (!got.defined() && !expected.defined()) return {};
  if (got.defined() != expected.defined() || got.scalar_type() != expected.scalar_type() ||
      got.sizes() != expected.sizes())
    return {{}, {}, expected_got(described(expected), described(got))};
  if (got.is_complex())
    return numbers_of(at::view_as_real(got.resolve_conj()),
                      at::view_as_real(expected.resolve_conj()));
  if (!got.is_floating_point()) {
    if (at::equal(got, expected)) return {};
    return {{}, {}, expected_got("equal integers", "different ones")};
  }
  const at::Tensor a = got.detach().to(at::kDouble), b = expected.detach().to(at::kDouble);
  const at::Tensor nan = at::isnan(b);
  if (!at::equal(at::isnan(a), nan))
    return {{}, {}, expected_got("NaN in the same places", "NaN in others")};
  const double largest = limits_of(got.scalar_type()).largest;
  return {a.masked_fill(nan, 0).clamp(-largest, largest),
          b.masked_fill(nan, 0).clamp(-largest, largest), ""};
}

/// The magnitudes in float64; zero for elements that are not finite.
at::Tensor finite_sizes(const at::Tensor& tensor) {
  const at::Tensor size = at::abs(tensor.detach().to(at::kDouble));
  return size.masked_fill((at::isnan(size)).logical_or(at::isinf(size)), 0);
}

}  // namespace

double unit_of(at::ScalarType dtype) { return limits_of(dtype).unit; }

double smallest_normal_of(at::ScalarType dtype) { return limits_of(dtype).smallest_normal; }

double largest_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0 || !tensor.is_floating_point()) return 0;
  return finite_sizes(tensor).max().item<double>();
}

at::Tensor largest_of_rows(const at::Tensor& tensor) {
  return finite_sizes(tensor).amax(-1, /*keepdim=*/true);
}

std::string difference(const at::Tensor& got, const at::Tensor& expected, double tolerance,
                       double scale) {
  return difference(got, expected, tolerance, at::scalar_tensor(scale, at::kDouble));
}

std::string difference(const at::Tensor& got, const at::Tensor& expected, double tolerance,
                       const at::Tensor& scale) {
  const auto [a, b, problem] = numbers_of(got, expected);
  if (!problem.empty() || !a.defined() || a.numel() == 0) return problem;
  // Both are divided before subtracting, because the difference of two large numbers may overflow.
  const at::Tensor size = at::maximum(at::maximum(at::abs(a), at::abs(b)), scale.to(a.device()))
                              .clamp_min(smallest_normal_of(got.scalar_type()));
  const at::Tensor apart = at::abs(a / size - b / size).flatten();
  const int64_t worst = apart.argmax().item<int64_t>();
  if (apart[worst].item<double>() <= tolerance) return "";
  std::ostringstream want, have;
  want.precision(9);
  have.precision(9);
  want << expected.detach().flatten()[worst].item<double>() << " at element " << worst << " within "
       << tolerance << " of " << size.flatten()[worst].item<double>();
  have << got.detach().flatten()[worst].item<double>();
  return expected_got(want.str(), have.str());
}

std::string difference_in_norm(const at::Tensor& got, const at::Tensor& expected,
                               double tolerance) {
  const auto [a, b, problem] = numbers_of(got, expected);
  if (!problem.empty() || !a.defined() || a.numel() == 0) return problem;
  const at::Tensor both_infinite =
      at::isinf(got.detach()).logical_and(at::isinf(expected.detach()));
  const at::Tensor x = a.masked_fill(both_infinite, 0), y = b.masked_fill(both_infinite, 0);
  const double largest =
      std::max({largest_of(x), largest_of(y), std::numeric_limits<double>::min()});
  const double apart = (x / largest - y / largest).norm().item<double>(),
               size = (y / largest).norm().item<double>();
  if (apart <= tolerance * size) return "";
  std::ostringstream have;
  have << apart / size;
  return expected_got("a relative error in norm within " + std::to_string(tolerance), have.str());
}

}  // namespace tandem
