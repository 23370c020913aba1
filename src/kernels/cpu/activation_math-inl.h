// The activations, alone and with their gradient. Most take one exponential and one division.
// Included once per Highway target.

#if defined(TANDEM_KERNELS_CPU_ACTIVATION_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_ACTIVATION_MATH_INL_H_
#undef TANDEM_KERNELS_CPU_ACTIVATION_MATH_INL_H_
#else
#define TANDEM_KERNELS_CPU_ACTIVATION_MATH_INL_H_
#endif

#include <algorithm>
#include <cfloat>
#include <cmath>
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

/// How exact an activation is: `full` is as exact as float32 allows; `brief` has a relative error
/// of 2^-16, below the last bit of any 16-bit element.
enum class Precision { full, brief };

/// The formula of each activation: value(x), and value_and_grad(x, grad) with the bitwise equal
/// value and grad * act'(x). The formula of a unit with numbers is constructed from them; its value
/// is the gate's factor, and other(b) the second factor, with other_grad(b, grad) = grad *
/// other'(b).
template <Activation kActivation, Precision kPrecision>
struct Formula;

/// 1 / (1 + e)
template <size_t N>
HWY_INLINE Pack<N> sigmoid_of(const Pack<N>& e) {
  return Pack<N>(1.0f) / (Pack<N>(1.0f) + e);
}
/// 1 - s for s = sigmoid_of(e), without cancellation. The bound gives 0 instead of NaN if e is
/// infinite and s is 0.
template <size_t N>
HWY_INLINE Pack<N> complement_of(const Pack<N>& e, const Pack<N>& s) {
  return at_most(FLT_MAX, e) * s;
}

/// `kept` where x is above 0 or NaN; 0 elsewhere.
template <size_t N>
HWY_INLINE Pack<N> zero_where_off(const Pack<N>& x, const Pack<N>& kept) {
  const auto zero = hn::Zero(hn::ScalableTag<float>());
  return each([&](auto v, auto k)
                  TANDEM_INLINE_LAMBDA { return hn::IfThenZeroElse(hn::Le(v, zero), k); },
              x, kept);
}

/// `kept` where x is at least the bound; 0 where it is below or NaN.
template <size_t N>
HWY_INLINE Pack<N> zero_below(float bound, const Pack<N>& x, const Pack<N>& kept) {
  const auto limit = hn::Set(hn::ScalableTag<float>(), bound);
  return each([&](auto v, auto k)
                  TANDEM_INLINE_LAMBDA { return hn::IfThenElseZero(hn::Ge(v, limit), k); },
              x, kept);
}

/// x * sigmoid(v(x)). A gate provides `bounded`, x clamped to the range in which exp(-v) is
/// computed, exp(-v) itself, and the derivative of v.
template <class Gate>
struct Gated {
  template <size_t N>
  HWY_INLINE Pack<N> value(const Pack<N>& x) const {
    // Below the range the sigmoid is 0: a finite x gives -0 and -infinity gives NaN, as torch's
    // formulas do.
    return x * sigmoid_of(gate.exp_negated(gate.bounded(x)));
  }

  /// The value, bitwise equal to value(x), and grad * derivative at x.
  template <size_t N>
  HWY_INLINE ValueAndGrad<N> value_and_grad(const Pack<N>& x, const Pack<N>& grad) const {
    const Pack<N> bounded = gate.bounded(x);
    const Pack<N> e = gate.exp_negated(bounded);
    const Pack<N> s = sigmoid_of(e);
    // x * 0 changes nothing for a finite x and is NaN at infinity, as torch's formulas are.
    const Pack<N> slope = mul_add(x, Pack<N>(0.0f), s);
    return {x * s,
            grad * mul_add(gate.inner_slope(bounded * s, bounded), complement_of(e, s), slope)};
  }

  Gate gate;
};

template <Precision kPrecision>
struct SiluGate {
  template <size_t N>
  static HWY_INLINE Pack<N> bounded(const Pack<N>& x) {
    return at_most(87.0f, at_least(-104.0f, x));
  }
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
  template <size_t N>
  static HWY_INLINE Pack<N> bounded(const Pack<N>& x) {
    return at_most(9.9f, at_least(-10.4f, x));
  }
  template <size_t N>
  static HWY_INLINE Pack<N> exp_negated(const Pack<N>& x) {
    if constexpr (kPrecision == Precision::full)
      return exp_negated_gelu(x);
    else
      return exp_negated_gelu_short(x);
  }
  /// factor * dv/dx with dv/dx = kGeluLinear + 3 kGeluCubic x^2, written so that it shares a
  /// product with exp(-v).
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

/// A number of a unit, clamped for the kernels.
inline double held(double number) { return std::clamp(number, -0x1p100, 0x1p100); }

/// v = rate * x. The rate is held in two parts, because an absolute error of v is a relative error
/// of exp(-v).
template <Precision kPrecision>
class LinearGate {
 public:
  explicit LinearGate(double number)
      : rate_(static_cast<float>(held(number))),
        rate_low_(static_cast<float>(held(number) - static_cast<double>(rate_))),
        per_power_(static_cast<float>(-1.4426950408889634 * held(number))) {
    const float low = static_cast<float>(-104 / held(number)),
                high = static_cast<float>(87 / held(number));
    low_ = number == 0 ? -HUGE_VALF : number > 0 ? low : high;
    high_ = number == 0 ? HUGE_VALF : number > 0 ? high : low;
  }

  template <size_t N>
  HWY_INLINE Pack<N> bounded(const Pack<N>& x) const {
    return at_most(high_, at_least(low_, x));
  }
  template <size_t N>
  HWY_INLINE Pack<N> exp_negated(const Pack<N>& x) const {
    if constexpr (kPrecision == Precision::full) {
      const Pack<N> rate(rate_), v = x * rate;
      const Pack<N> lost = exact_mul_add(x, rate, Pack<N>(0.0f) - v);
      return HWY_NAMESPACE::exp_negated(v, mul_add(x, Pack<N>(rate_low_), lost));
    } else {
      return exp_negated_short(x, Pack<N>(per_power_));
    }
  }
  template <size_t N>
  HWY_INLINE Pack<N> inner_slope(const Pack<N>& factor, const Pack<N>&) const {
    return factor * Pack<N>(rate_);
  }

 private:
  float rate_, rate_low_, per_power_, low_, high_;
};
template <Precision kPrecision>
struct Formula<Activation::qgelu, kPrecision> : Gated<LinearGate<kPrecision>> {
  Formula() : Gated<LinearGate<kPrecision>>{LinearGate<kPrecision>(1.702)} {}
};

template <Precision kPrecision>
struct Formula<Activation::sigmoid, kPrecision> {
  using Gate = SiluGate<kPrecision>;
  template <size_t N>
  static HWY_INLINE Pack<N> value(const Pack<N>& x) {
    return value_of(x, Gate::exp_negated(Gate::bounded(x)));
  }
  template <size_t N>
  static HWY_INLINE ValueAndGrad<N> value_and_grad(const Pack<N>& x, const Pack<N>& grad) {
    const Pack<N> e = Gate::exp_negated(Gate::bounded(x)), s = value_of(x, e);
    const auto most = hn::Set(hn::ScalableTag<float>(), FLT_MAX);
    const Pack<N> slope = each(  // exactly 0 at infinity
        [&](auto v, auto k) TANDEM_INLINE_LAMBDA { return hn::IfThenZeroElse(hn::Gt(v, most), k); },
        x, s * complement_of(e, s));
    return {s, grad * slope};
  }

 private:
  /// Handles NaN, whose exponential is computed as a number.
  template <size_t N>
  static HWY_INLINE Pack<N> value_of(const Pack<N>& x, const Pack<N>& e) {
    return each([](auto v, auto s)
                    TANDEM_INLINE_LAMBDA { return hn::IfThenElse(hn::IsNaN(v), v, s); },
                x, sigmoid_of(e));
  }
};

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
};

template <Precision kPrecision>
struct Formula<Activation::srelu, kPrecision> {
  template <size_t N>
  static HWY_INLINE Pack<N> value(const Pack<N>& x) {
    const Pack<N> on = zero_where_off(x, x);
    return on * on;
  }
  template <size_t N>
  static HWY_INLINE ValueAndGrad<N> value_and_grad(const Pack<N>& x, const Pack<N>& grad) {
    const Pack<N> on = zero_where_off(x, x), half = on * grad;
    return {on * on, zero_where_off(x, half + half)};
  }
};

/// x Phi(x) = max(x, 0) - |x| Phi(-|x|) with the normal distribution Phi. For t >= 0, Phi(-t) is
/// exp(-t^2 / 2), which falls below float32's range at kLast, times a smooth function.
template <Precision kPrecision>
struct Formula<Activation::erf_gelu, kPrecision> {
  template <size_t N>
  static HWY_INLINE Pack<N> value(const Pack<N>& x) {
    const Pack<N> t = bounded_magnitude(x);
    return zero_where_off(x, x) - times_tail(t, times_power(t, x, magnitude_of(below_last(x))));
  }
  template <size_t N>
  static HWY_INLINE ValueAndGrad<N> value_and_grad(const Pack<N>& x, const Pack<N>& grad) {
    const Pack<N> one(1.0f), t = bounded_magnitude(x), e = times_power(t, x, one);
    const Pack<N> tail = times_tail(t, e), phi = zero_where_off(x, one - (tail + tail)) + tail;
    // x * 0 is NaN at infinity, as torch's formulas are.
    const Pack<N> slope = mul_add(below_last(x) * e, Pack<N>(0.398942280f), phi);
    return {value(x), grad * mul_add(x, Pack<N>(0.0f), slope)};
  }

 private:
  static constexpr float kLast = 13.1875f;

  template <size_t N>
  static HWY_INLINE Pack<N> below_last(const Pack<N>& x) {
    return at_most(kLast, x);
  }
  template <size_t N>
  static HWY_INLINE Pack<N> bounded_magnitude(const Pack<N>& x) {
    return at_most(kLast, magnitude_of(x));
  }
  /// factor * exp(-t^2 / 2), and factor * 0 where x is below -kLast.
  template <size_t N>
  static HWY_INLINE Pack<N> times_power(const Pack<N>& t, const Pack<N>& x, const Pack<N>& factor) {
    if constexpr (kPrecision == Precision::brief)  // 16-bit numbers have exact squares
      return factor * zero_below(-kLast, x, exp_negated_short(t * t, Pack<N>(-0.721347520f)));
    const Pack<N> half = t * Pack<N>(0.5f), v = t * half, shifted = shifted_power_of(v);
    const Pack<N> lost = exact_mul_add(t, half, Pack<N>(0.0f) - v);
    const Pack<N> power = scale_by_power_of_two(Pack<N>(1.0f), shifted);
    const Pack<N> scaled = factor * zero_below(-kLast, x, power);
    return mul_add(scaled, exp_below_one(remainder_of(v, shifted) + lost), scaled);
  }
  /// factor * Phi(-t) * exp(t^2 / 2)
  template <size_t N>
  static HWY_INLINE Pack<N> times_tail(const Pack<N>& t, const Pack<N>& factor) {
    using P = Pack<N>;
    if constexpr (kPrecision == Precision::brief)  // relative error 3.5e-7
      return factor * polynomial(t, 0.49999983f, 0.36051386f, 0.11869615f, 0.01685003f) /
             polynomial(t, 1.0f, 1.5188948f, 0.9494346f, 0.29731131f, 0.04224224f);
    // The divisor 2 + t (...) is nearly linear: a polynomial in s with a relative error of 4.9e-9.
    const P s = P(1.0f) / mul_add(t, P(0.3125f), P(1.0f));
    const P slope =
        polynomial(s, 2.50679183f, -0.629214406f, -0.333227366f, -0.432945669f, 1.24048877f,
                   -2.86118889f, 5.12348223f, -4.91768408f, 2.34642386f, -0.447157741f);
    return factor / mul_add(t, slope, P(2.0f));
  }
};

/// x tanh(log(1 + exp(x))) = x / (h + 1 / (4 h)) with h = 1/2 + exp(-x).
template <Precision kPrecision>
struct Formula<Activation::mish, kPrecision> {
  using Gate = SiluGate<kPrecision>;
  template <size_t N>
  static HWY_INLINE Pack<N> value(const Pack<N>& x) {
    return x / inverse_tanh(Gate::exp_negated(Gate::bounded(x)));
  }
  template <size_t N>
  static HWY_INLINE ValueAndGrad<N> value_and_grad(const Pack<N>& x, const Pack<N>& grad) {
    // With e = exp(-x) and t the tanh: t + x (1 - t^2) / (1 + e) = t + x t^2 (e / h)^2 (1 + e). The
    // bound avoids infinity times 0.
    const Pack<N> e = Gate::exp_negated(Gate::bounded(x)), divisor = inverse_tanh(e);
    const Pack<N> t = Pack<N>(1.0f) / divisor, y = x / divisor, finite = at_most(FLT_MAX, e);
    const Pack<N> share = finite / (Pack<N>(0.5f) + e);
    const Pack<N> bend = share * (share * t * (Pack<N>(1.0f) + finite));
    // x * 0 is NaN at infinity, as torch's formulas are.
    return {y, grad * mul_add(y, bend, mul_add(x, Pack<N>(0.0f), t))};
  }

 private:
  template <size_t N>
  static HWY_INLINE Pack<N> inverse_tanh(const Pack<N>& e) {
    const Pack<N> h = Pack<N>(0.5f) + e;
    return h + Pack<N>(0.25f) / h;
  }
};

/// log(1 + exp(x)) = max(x, 0) + log(1 + n) with n = exp(-|x|).
template <Precision kPrecision>
struct Formula<Activation::softplus, kPrecision> {
  template <size_t N>
  static HWY_INLINE Pack<N> value(const Pack<N>& x) {
    const Pack<N> n = exp_of(at_most(87.0f, magnitude_of(x))), s = n / (Pack<N>(2.0f) + n);
    const Pack<N> log =  // log(1 + n) = 2 atanh(s), s <= 1/3; relative error 4e-9
        s * polynomial(s * s, 2.0f, 0.66666317f, 0.400249064f, 0.279606462f, 0.281781644f);
    return zero_where_off(x, x) + zero_below(-87.0f, x, log);
  }
  template <size_t N>
  static HWY_INLINE ValueAndGrad<N> value_and_grad(const Pack<N>& x, const Pack<N>& grad) {
    return {value(x), grad * Formula<Activation::sigmoid, kPrecision>::value(x)};
  }

 private:
  template <size_t N>
  static HWY_INLINE Pack<N> exp_of(const Pack<N>& negated) {
    if constexpr (kPrecision == Precision::full)
      return exp_negated_closely(negated);
    else
      return exp_negated_short(negated);
  }
};

template <Precision kPrecision>
struct Formula<Activation::hard_swish, kPrecision> {
  template <size_t N>
  static HWY_INLINE Pack<N> value(const Pack<N>& x) {
    return x * (at_most(6.0f, at_least(0.0f, x + Pack<N>(3.0f))) * Pack<N>(kSixth));
  }
  template <size_t N>
  static HWY_INLINE ValueAndGrad<N> value_and_grad(const Pack<N>& x, const Pack<N>& grad) {
    const auto slope = [](auto v, auto inside) TANDEM_INLINE_LAMBDA {
      const hn::ScalableTag<float> d;
      const auto bend = hn::Set(d, 3.0f), one = hn::Set(d, 1.0f);
      return hn::IfThenZeroElse(hn::Le(v, hn::Neg(bend)),
                                hn::IfThenElse(hn::Ge(v, bend), one, inside));
    };
    const Pack<N> inside = mul_add(x, Pack<N>(2 * kSixth), Pack<N>(0.5f));
    return {value(x), grad * each(slope, x, inside)};
  }

 private:
  static constexpr float kSixth = 0.166666667f;
};

template <Precision kPrecision>
struct Formula<Activation::leaky_relu, kPrecision> {
  template <size_t N>
  static HWY_INLINE Pack<N> value(const Pack<N>& x) {
    return leaked(x, x);
  }
  template <size_t N>
  static HWY_INLINE ValueAndGrad<N> value_and_grad(const Pack<N>& x, const Pack<N>& grad) {
    return {leaked(x, x), leaked(x, grad)};
  }

 private:
  /// `kept` where x is above 0; a hundredth of it elsewhere.
  template <size_t N>
  static HWY_INLINE Pack<N> leaked(const Pack<N>& x, const Pack<N>& kept) {
    const auto zero = hn::Zero(hn::ScalableTag<float>());
    return each([&](auto v, auto k, auto less)
                    TANDEM_INLINE_LAMBDA { return hn::IfThenElse(hn::Gt(v, zero), k, less); },
                x, kept, kept * Pack<N>(0.01f));
  }
};

template <Precision kPrecision>
struct Formula<Activation::situglu, kPrecision> {
  explicit Formula(const UnitNumbers& numbers) : a_(numbers[0]), b_(numbers[1]) {}

  template <size_t N>
  HWY_INLINE Pack<N> value(const Pack<N>& a) const {
    return a_.value(a) * sigmoid_of(Gate::exp_negated(Gate::bounded(a)));
  }
  template <size_t N>
  HWY_INLINE ValueAndGrad<N> value_and_grad(const Pack<N>& a, const Pack<N>& grad) const {
    const Pack<N> e = Gate::exp_negated(Gate::bounded(a)), s = sigmoid_of(e), t = a_.value(a);
    return {t * s, grad * (s * mul_add(t, complement_of(e, s), a_.slope(a)))};
  }
  template <size_t N>
  HWY_INLINE Pack<N> other(const Pack<N>& b) const {
    return b_.value(b);
  }
  template <size_t N>
  HWY_INLINE Pack<N> other_grad(const Pack<N>& b, const Pack<N>& grad) const {
    return grad * b_.slope(b);
  }

 private:
  using Gate = SiluGate<kPrecision>;

  /// beta tanh(x / beta)
  struct Bounded {
    explicit Bounded(double number)
        : beta(static_cast<float>(std::max(0x1p-100, held(number)))),
          inverse(static_cast<float>(1 / std::max(0x1p-100, held(number)))) {}
    template <size_t N>
    HWY_INLINE Pack<N> value(const Pack<N>& x) const {
      return Pack<N>(beta) * tanh_of(x * Pack<N>(inverse));
    }
    template <size_t N>
    HWY_INLINE Pack<N> slope(const Pack<N>& x) const {
      return tanh_slope_of(x * Pack<N>(inverse));
    }
    float beta, inverse;
  };

  Bounded a_, b_;
};

template <Precision kPrecision>
struct Formula<Activation::clamped_swiglu, kPrecision> {
  explicit Formula(const UnitNumbers& numbers)
      : limit_(static_cast<float>(held(numbers[0]))),
        gated_{LinearGate<kPrecision>(numbers[1])},
        offset_(static_cast<float>(held(numbers[2]))) {}

  template <size_t N>
  HWY_INLINE Pack<N> value(const Pack<N>& a) const {
    return gated_.value(at_most(limit_, a));
  }
  template <size_t N>
  HWY_INLINE ValueAndGrad<N> value_and_grad(const Pack<N>& a, const Pack<N>& grad) const {
    ValueAndGrad<N> result = gated_.value_and_grad(at_most(limit_, a), grad);
    result.grad = zero_where_above(a, result.grad);
    return result;
  }
  template <size_t N>
  HWY_INLINE Pack<N> other(const Pack<N>& b) const {
    return at_most(limit_, at_least(-limit_, b)) + Pack<N>(offset_);
  }
  template <size_t N>
  HWY_INLINE Pack<N> other_grad(const Pack<N>& b, const Pack<N>& grad) const {
    return zero_where_above(b, zero_where_above(Pack<N>(0.0f) - b, grad));
  }

 private:
  /// `kept` where x is at most the limit; 0 elsewhere and at NaN, as torch.clamp's gradient.
  template <size_t N>
  HWY_INLINE Pack<N> zero_where_above(const Pack<N>& x, const Pack<N>& kept) const {
    const auto limit = hn::Set(hn::ScalableTag<float>(), limit_);
    return each([&](auto v, auto k)
                    TANDEM_INLINE_LAMBDA { return hn::IfThenElseZero(hn::Le(v, limit), k); },
                x, kept);
  }

  float limit_;
  Gated<LinearGate<kPrecision>> gated_;
  float offset_;
};

/// Whether a gated unit's second factor is a function of b instead of b itself.
template <class Act>
concept BendsOther = requires(const Act& act, const Pack<1>& b) {
  act.other(b);
};

template <class Act, size_t N>
HWY_INLINE Pack<N> other_of(const Act& act, const Pack<N>& b) {
  if constexpr (BendsOther<Act>)
    return act.other(b);
  else
    return b;
}
template <class Act, size_t N>
HWY_INLINE Pack<N> other_grad_of(const Act& act, const Pack<N>& b, const Pack<N>& grad) {
  if constexpr (BendsOther<Act>)
    return act.other_grad(b, grad);
  else
    return grad;
}

template <Precision kPrecision, typename Body, size_t... kIndex>
HWY_INLINE void with_formula(Activation activation, Body&& body, std::index_sequence<kIndex...>) {
  const std::integral_constant<Precision, kPrecision> precision;
  static_cast<void>(((activation == Activation{kIndex} &&
                      (body(Formula<Activation{kIndex}, kPrecision>{}, precision), true)) ||
                     ...));
}
template <Precision kPrecision, class Body, size_t... kIndex>
HWY_INLINE void with_unit(const Function& function, Body&& body, std::index_sequence<kIndex...>) {
  const std::integral_constant<Precision, kPrecision> precision;
  static_cast<void>(
      ((function.activation == numbered_unit(kIndex) &&
        (body(Formula<numbered_unit(kIndex), kPrecision>(function.numbers), precision), true)) ||
       ...));
}

/// Calls `body` with the function's Formula in the precision that z's element needs, and with that
/// precision as a constant. The choice depends on z's element alone, so forward and backward agree.
/// A lambda needs HWY_ATTR before its body.
template <bool kGated, typename Body>
HWY_INLINE void with_activation(const Function& function, Element z_element, Body&& body) {
  const bool is_full = z_element == Element::float32;
  if (is_full)
    with_formula<Precision::full>(function.activation, body, ActivationIndices());
  else
    with_formula<Precision::brief>(function.activation, body, ActivationIndices());
  if constexpr (kGated) {
    if (is_full)
      with_unit<Precision::full>(function, body, NumberedUnitIndices());
    else
      with_unit<Precision::brief>(function, body, NumberedUnitIndices());
  }
}

/// Calls `body(c, count, columns)` for runs of the columns [first, first + count) of y. `columns`
/// are the first columns of a and b (z, if not gated) in a row of z; both are contiguous for the
/// run.
template <bool kGated, typename Body>
HWY_INLINE void for_each_run(const Function& function, size_t y_cols, size_t first, size_t count,
                             const Body& body) {
  const size_t block = function.interleave;
  if (!kGated || block == 0) {
    const size_t columns[2] = {first, y_cols + first};
    body(first, count, columns);
    return;
  }
  for (const size_t end = first + count; first < end;) {
    const size_t behind = first % block, run = std::min(block - behind, end - first);
    const size_t a = 2 * (first - behind) + behind, columns[2] = {a, a + block};
    body(first, run, columns);
    first += run;
  }
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_ACTIVATION_MATH_INL_H_
