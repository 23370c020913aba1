// The exponentials of activations, in float32. Included once per Highway target.

#if defined(TANDEM_KERNELS_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_MATH_INL_H_
#undef TANDEM_KERNELS_CPU_MATH_INL_H_
#else
#define TANDEM_KERNELS_CPU_MATH_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// x86's minimum and maximum return the second operand if one is NaN; other targets differ.
constexpr bool kMinMaxKeepSecond = HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2;

/// The larger (at_most: the smaller) of `x` and `bound`; NaN if x is NaN.
template <size_t N>
HWY_INLINE Pack<N> at_least(float bound, const Pack<N>& x) {
  const auto limit = hn::Set(hn::ScalableTag<float>(), bound);
  return each(
      [&](auto v) TANDEM_INLINE_LAMBDA {
        if constexpr (kMinMaxKeepSecond)
          return hn::Max(limit, v);
        else
          return hn::IfThenElse(hn::Lt(v, limit), limit, v);
      },
      x);
}
template <size_t N>
HWY_INLINE Pack<N> at_most(float bound, const Pack<N>& x) {
  const auto limit = hn::Set(hn::ScalableTag<float>(), bound);
  return each(
      [&](auto v) TANDEM_INLINE_LAMBDA {
        if constexpr (kMinMaxKeepSecond)
          return hn::Min(limit, v);
        else
          return hn::IfThenElse(hn::Gt(v, limit), limit, v);
      },
      x);
}

/// a * b + c with one rounding on targets with FMA. Elsewhere the product is split, and the error
/// is below 2^-40 of it.
template <size_t N>
HWY_INLINE Pack<N> exact_mul_add(const Pack<N>& a, const Pack<N>& b, const Pack<N>& c) {
#if HWY_NATIVE_FMA
  return mul_add(a, b, c);
#else
  const auto high_half = [](auto v) TANDEM_INLINE_LAMBDA {
    const hn::ScalableTag<float> d;
    return hn::And(v, hn::BitCast(d, hn::Set(hn::RebindToUnsigned<decltype(d)>(), 0xFFFFF000u)));
  };
  const Pack<N> a_high = each(high_half, a), a_low = a - a_high;
  const Pack<N> b_high = each(high_half, b), b_low = b - b_high;
  const Pack<N> product = a * b;
  const Pack<N> lost =
      ((a_high * b_high - product) + (a_high * b_low + a_low * b_high)) + a_low * b_low;
  return (product + c) + lost;
#endif
}

/// 1.5 * 2^23. The sum of a float32 and this is rounded to an integer, which is in its low bits.
constexpr float kRoundToInteger = 12582912.0f;

/// mantissa * 2^k for mantissa in [0.7, 1.42] and k in [-126, 150], with shifted = k +
/// kRoundToInteger; infinity from 2^128 on.
template <size_t N>
HWY_INLINE Pack<N> scale_by_power_of_two(const Pack<N>& mantissa, const Pack<N>& shifted) {
  return each(
      [](auto m, auto s) TANDEM_INLINE_LAMBDA {
        const hn::ScalableTag<float> d;
        const hn::RebindToUnsigned<decltype(d)> du;
        const auto bits = hn::Add(hn::BitCast(du, m), hn::ShiftLeft<23>(hn::BitCast(du, s)));
        return hn::BitCast(d, hn::Min(bits, hn::Set(du, 0x7F800000u)));
      },
      mantissa, shifted);
}

/// c[0] + x (c[1] + x (...)), by Horner's rule.
template <size_t N, typename... C>
HWY_INLINE Pack<N> polynomial(const Pack<N>& x, float constant, C... rest) {
  if constexpr (sizeof...(C) == 0)
    return constant;
  else
    return mul_add(polynomial(x, rest...), x, Pack<N>(constant));
}

// exp(-x) = exp(-f) 2^k with f = x + k ln 2. Each function returns one pack, because a struct of
// several goes through memory.

/// k + kRoundToInteger
template <size_t N>
HWY_INLINE Pack<N> shifted_power_of(const Pack<N>& x) {
  return mul_add(x, Pack<N>(-1.44269504f), Pack<N>(kRoundToInteger));
}
/// f, |f| <= ln 2 / 2. The high part of ln 2 has 17 bits: its product with k is exact.
template <size_t N>
HWY_INLINE Pack<N> remainder_of(const Pack<N>& x, const Pack<N>& shifted) {
  const Pack<N> k = shifted - Pack<N>(kRoundToInteger);
  return mul_add(k, Pack<N>(1.42860682e-06f), mul_add(k, Pack<N>(0.693145751953125f), x));
}
template <size_t N>
HWY_INLINE Pack<N> exp_of_remainder(const Pack<N>& f, const Pack<N>& shifted) {
  // exp(-f), minimax, relative error 9.2e-8.
  const Pack<N> mantissa = polynomial(f, 1.0f, -0.999999702f, 0.499991477f, -0.166676506f,
                                      0.0418981761f, -0.00828949921f);
  return scale_by_power_of_two(mantissa, shifted);
}

/// exp(-x) for x in [-104, 87]; infinity if that exceeds float32. Error: 2 ULP.
template <size_t N>
HWY_INLINE Pack<N> exp_negated(const Pack<N>& x) {
  const Pack<N> shifted = shifted_power_of(x);
  return exp_of_remainder(remainder_of(x, shifted), shifted);
}

/// exp(-(x + x_low)) for an x_low below 2^-10.
template <size_t N>
HWY_INLINE Pack<N> exp_negated(const Pack<N>& x, const Pack<N>& x_low) {
  const Pack<N> shifted = shifted_power_of(x);
  return exp_of_remainder(remainder_of(x, shifted) + x_low, shifted);
}

template <size_t N>
HWY_INLINE Pack<N> magnitude_of(const Pack<N>& x) {
  return each([](auto v) TANDEM_INLINE_LAMBDA { return hn::Abs(v); }, x);
}

/// 2 |x|, at most 87: beyond that the exponential is subnormal.
template <size_t N>
HWY_INLINE Pack<N> twice_magnitude(const Pack<N>& x) {
  const Pack<N> magnitude = magnitude_of(x);
  return at_most(87.0f, magnitude + magnitude);
}

/// exp(-f) - 1 for |f| <= ln 2 / 2, Taylor, relative error 1.5e-8. Nothing cancels for small f.
template <size_t N>
HWY_INLINE Pack<N> exp_below_one(const Pack<N>& f) {
  return f * polynomial(f, -1.0f, 0.5f, -0.166666667f, 0.0416666667f, -0.00833333333f,
                        0.00138888889f, -0.000198412698f);
}

/// exp(-x) for x in [-87, 87]. Error: 1 ULP.
template <size_t N>
HWY_INLINE Pack<N> exp_negated_closely(const Pack<N>& x) {
  const Pack<N> shifted = shifted_power_of(x);
  const Pack<N> power = scale_by_power_of_two(Pack<N>(1.0f), shifted);
  return mul_add(power, exp_below_one(remainder_of(x, shifted)), power);
}

/// tanh(x). Error: 4 ULP.
template <size_t N>
HWY_INLINE Pack<N> tanh_of(const Pack<N>& x) {
  const Pack<N> one(1.0f), v = twice_magnitude(x), shifted = shifted_power_of(v);
  const Pack<N> power = scale_by_power_of_two(one, shifted);
  const Pack<N> e =  // exp(-v) - 1
      mul_add(power, exp_below_one(remainder_of(v, shifted)), power - one);
  return each([](auto t, auto sign) TANDEM_INLINE_LAMBDA { return hn::CopySign(t, sign); },
              Pack<N>(-1.0f) * e / (Pack<N>(2.0f) + e), x);
}

/// 1 - tanh(x)^2, without cancellation. Error: 8 ULP, and 2^-123.
template <size_t N>
HWY_INLINE Pack<N> tanh_slope_of(const Pack<N>& x) {
  const Pack<N> e = exp_negated(twice_magnitude(x)), below = Pack<N>(1.0f) + e;
  return Pack<N>(4.0f) * e / (below * below);
}

/// The tanh form of gelu is x / (1 + exp(-v)) with v = kGeluCubic * x * (x^2 + kGeluPivot).
constexpr float kGeluCubic = 0.0713548163f;  // 2 sqrt(2 / pi) * 0.044715
constexpr float kGeluLinear = 1.59576912f;   // 2 sqrt(2 / pi)
// 1 / 0.044715 in two parts. The high part is a multiple of 2^-17, so that subtracting it from x^2
// + kGeluPivot is exact for |x| <= 10.4.
constexpr float kGeluPivot = 22.363861083984375f, kGeluPivotLow = -1.08174799e-06f;

/// exp(-v) of gelu for |x| <= 10.4; infinity if that exceeds float32. Error: 2 ULP.
///
/// v reaches 97, and an absolute error of v is a relative error of exp(-v). So v is kept to 2^-24
/// absolute, in two parts.
template <size_t N>
HWY_INLINE Pack<N> exp_negated_gelu(const Pack<N>& x) {
  using P = Pack<N>;
  const P w = exact_mul_add(x, x, P(kGeluPivot));
  const P w_low = exact_mul_add(x, x, P(kGeluPivot) - w) + P(kGeluPivotLow);
  // In units of 1 / kGeluCubic: v = x (w + w_low). One power of two is ln 2 / kGeluCubic, whose
  // high part has 17 bits.
  const P shifted = mul_add(x * w, P(-0.10294324f), P(kRoundToInteger));
  const P k = shifted - P(kRoundToInteger);
  P f = exact_mul_add(x, w, k * P(9.714111328125f));
  f = mul_add(x, w_low, f);
  f = mul_add(k, P(-2.03001303e-05f), f);
  // exp(-kGeluCubic f), minimax, relative error 9.4e-8.
  const P mantissa = polynomial(f, 1.0f, -0.071354799f, 0.00254571228f, -6.05538298e-05f,
                                1.0861088e-06f, -1.5341902e-08f);
  return scale_by_power_of_two(mantissa, shifted);
}

/// 2^fraction * 2^k for |fraction| <= 1/2. Relative error 2^-18, which suffices for arguments of 8
/// or 11 bits.
template <size_t N>
HWY_INLINE Pack<N> exp2_short(const Pack<N>& fraction, const Pack<N>& shifted) {
  return scale_by_power_of_two(
      polynomial(fraction, 1.0f, 0.693124175f, 0.240241036f, 0.0559066944f, 0.00958271511f),
      shifted);
}

/// exp(-rate x) for |rate x| <= 104, per_power = -rate log2(e). Relative error 2^-16.
template <size_t N>
HWY_INLINE Pack<N> exp_negated_short(const Pack<N>& x, const Pack<N>& per_power) {
  const Pack<N> shifted = mul_add(x, per_power, Pack<N>(kRoundToInteger));
  return exp2_short(mul_sub(x, per_power, shifted - Pack<N>(kRoundToInteger)), shifted);
}

/// exp_negated with a relative error of 2^-16.
template <size_t N>
HWY_INLINE Pack<N> exp_negated_short(const Pack<N>& x) {
  return exp_negated_short(x, Pack<N>(-1.44269504f));
}

/// exp_negated_gelu with a relative error of 2^-16.
template <size_t N>
HWY_INLINE Pack<N> exp_negated_gelu_short(const Pack<N>& x) {
  using P = Pack<N>;
  const P slope = mul_add(x * x, P(-0.10294324f), P(-2.30220819f));  // -v log2(e) / x
  const P shifted = mul_add(x, slope, P(kRoundToInteger));
  return exp2_short(mul_sub(x, slope, shifted - P(kRoundToInteger)), shifted);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_MATH_INL_H_
