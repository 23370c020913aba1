// The activations, alone and with their gradient, from one exponential and one division. Included
// once per Highway target.

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

/// How exact an activation is: as float32 can be, or 2^-16 of the result, below the last bit of any
/// 16-bit element.
enum class Precision { full, brief };

/// The formula of each activation: value(x) and value_and_grad(x, grad), which gives the same
/// value, to the bit, and grad * act'(x).
template <Activation kActivation, Precision kPrecision>
struct Formula;

/// x * sigmoid(v(x)). A gate gives the bounds between which exp(-v) is taken, exp(-v) itself and
/// the derivative of v.
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
    // 1 - sigmoid without cancellation; the bound makes it 0, not NaN, where e is infinite and s is
    // 0.
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
struct Formula<Activation::silu, kPrecision> : Gated<SiluGate<kPrecision>> {};

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
  /// factor * dv/dx, dv/dx = kGeluLinear + 3 kGeluCubic x^2, written so that a product is used
  /// again that exp(-v) needs.
  template <size_t N>
  static HWY_INLINE Pack<N> inner_slope(const Pack<N>& factor, const Pack<N>& x) {
    using P = Pack<N>;
    if constexpr (kPrecision == Precision::brief)
      return factor * mul_add(x * x, P(3 * kGeluCubic), P(kGeluLinear));
    const P w = exact_mul_add(x, x, P(kGeluPivot));
    return factor * mul_add(w, P(3 * kGeluCubic), P(-2 * kGeluLinear));
  }
};
template <Precision kPrecision>
struct Formula<Activation::gelu, kPrecision> : Gated<GeluGate<kPrecision>> {};

template <Precision kPrecision>
struct Formula<Activation::relu, kPrecision> {
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

template <Precision kPrecision, typename Body, size_t... kIndex>
HWY_INLINE void with_formula(Activation activation, Body&& body, std::index_sequence<kIndex...>) {
  const std::integral_constant<Precision, kPrecision> precision;
  static_cast<void>(((activation == Activation{kIndex} &&
                      (body(Formula<Activation{kIndex}, kPrecision>{}, precision), true)) ||
                     ...));
}

/// Calls `body` with a value of the activation's Formula of the precision that z deserves, and with
/// that precision (a constant). The choice depends on z's element alone, so that forward and
/// backward agree. A lambda needs HWY_ATTR before its body.
template <typename Body>
HWY_INLINE void with_activation(Activation activation, Element z_element, Body&& body) {
  if (z_element == Element::float32)
    with_formula<Precision::full>(activation, body, ActivationIndices());
  else
    with_formula<Precision::brief>(activation, body, ActivationIndices());
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_ACTIVATION_MATH_INL_H_
