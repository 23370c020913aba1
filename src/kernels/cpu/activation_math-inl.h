// The activations, alone and with their gradient, from one exponential and one division. Included once per Highway target.

#if defined(TANDEM_KERNELS_CPU_ACTIVATION_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_ACTIVATION_MATH_INL_H_
#undef TANDEM_KERNELS_CPU_ACTIVATION_MATH_INL_H_
#else
#define TANDEM_KERNELS_CPU_ACTIVATION_MATH_INL_H_
#endif

#include <cfloat>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/activation.h"
#include "kernels/cpu/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <size_t N>
struct ValueAndGrad {
  Pack<N> value, grad;
};

/// x * sigmoid(v(x)). A gate gives the bounds between which exp(-v) is taken, exp(-v) itself and the derivative of v.
template <class Gate>
struct Gated {
  template <size_t N>
  static HWY_INLINE Pack<N> value(const Pack<N>& x) {
    // Below kLow the sigmoid is 0: a finite x gives -0 and -infinity NaN, as torch's formulas do.
    return x * sigmoid(Gate::exp_negated(at_most(Gate::kHigh, at_least(Gate::kLow, x))));
  }

  /// value(x), the same bits, and grad * derivative at x.
  template <size_t N>
  static HWY_INLINE ValueAndGrad<N> value_and_grad(const Pack<N>& x, const Pack<N>& grad) {
    const Pack<N> bounded = at_most(Gate::kHigh, at_least(Gate::kLow, x));
    const Pack<N> e = Gate::exp_negated(bounded);
    const Pack<N> s = sigmoid(e);
    // 1 - sigmoid without cancellation; the bound makes it 0, not NaN, where e is infinite and s is 0.
    const Pack<N> complement = at_most(FLT_MAX, e) * s;
    // x * 0 is what torch's formulas come to at infinity, NaN; it changes nothing at a finite x.
    const Pack<N> slope = mul_add(x, Pack<N>(0.0f), s);
    return {x * s, grad * mul_add(Gate::inner_slope(bounded * s, bounded), complement, slope)};
  }

 private:
  template <size_t N>
  static HWY_INLINE Pack<N> sigmoid(const Pack<N>& e) {
    return Pack<N>(1.0f) / (Pack<N>(1.0f) + e);
  }
};

/// How exact an activation is: as float32 can be, or 2^-16 of the result, below the last bit of any 16-bit element.
enum class Precision { full, brief };

template <Precision kPrecision>
struct SiluGate {
  static constexpr float kLow = -104.0f, kHigh = 87.0f;
  template <size_t N>
  static HWY_INLINE Pack<N> exp_negated(const Pack<N>& x) {
    if constexpr (kPrecision == Precision::full)
      return HWY_NAMESPACE::exp_negated(x);
    else
      return exp_negated_short(x);
  }
  /// factor * dv/dx
  template <size_t N>
  static HWY_INLINE Pack<N> inner_slope(const Pack<N>& factor, const Pack<N>&) {
    return factor;
  }
};

template <Precision kPrecision>
struct GeluGate {
  static constexpr float kLow = -10.4f, kHigh = 9.9f;
  template <size_t N>
  static HWY_INLINE Pack<N> exp_negated(const Pack<N>& x) {
    if constexpr (kPrecision == Precision::full)
      return exp_negated_gelu(x);
    else
      return exp_negated_gelu_short(x);
  }
  /// factor * dv/dx, dv/dx = kGeluLinear + 3 kGeluCubic x^2, written so that a product is used again that exp(-v) needs.
  template <size_t N>
  static HWY_INLINE Pack<N> inner_slope(const Pack<N>& factor, const Pack<N>& x) {
    using P = Pack<N>;
    if constexpr (kPrecision == Precision::brief)
      return factor * mul_add(x * x, P(3 * kGeluCubic), P(kGeluLinear));
    const P w = exact_mul_add(x, x, P(kGeluPivot));
    return factor * mul_add(w, P(3 * kGeluCubic), P(-2 * kGeluLinear));
  }
};

struct Relu {
  template <size_t N>
  static HWY_INLINE Pack<N> value(const Pack<N>& x) {
    return zero_where_off(x, x);
  }
  template <size_t N>
  static HWY_INLINE ValueAndGrad<N> value_and_grad(const Pack<N>& x, const Pack<N>& grad) {
    return {zero_where_off(x, x), zero_where_off(x, grad)};
  }

 private:
  template <size_t N>
  static HWY_INLINE Pack<N> zero_where_off(const Pack<N>& x, const Pack<N>& kept) {
    const auto zero = hn::Zero(hn::ScalableTag<float>());
    return each([&](auto v, auto k)
                    TANDEM_INLINE_LAMBDA { return hn::IfThenZeroElse(hn::Le(v, zero), k); },
                x, kept);
  }
};

template <Precision kPrecision>
using Gelu = Gated<GeluGate<kPrecision>>;
template <Precision kPrecision>
using Silu = Gated<SiluGate<kPrecision>>;

/// Calls `body` with a value of Gelu, Silu or Relu of the precision that z deserves, and with that precision (a constant).
/// The choice depends on z's element alone, so that forward and backward agree. A lambda needs HWY_ATTR before its body.
template <typename Body>
HWY_INLINE void with_activation(Activation activation, Element z_element, Body&& body) {
  const auto with_precision = [&](auto precision) HWY_ATTR {
    constexpr Precision kPrecision = decltype(precision)::value;
    if (activation == Activation::gelu)
      body(Gelu<kPrecision>{}, precision);
    else if (activation == Activation::silu)
      body(Silu<kPrecision>{}, precision);
    else
      body(Relu{}, precision);
  };
  if (z_element == Element::float32)
    with_precision(std::integral_constant<Precision, Precision::full>{});
  else
    with_precision(std::integral_constant<Precision, Precision::brief>{});
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_ACTIVATION_MATH_INL_H_
