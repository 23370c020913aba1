// Stochastic rounding of vectors. Included once per Highway target; bitwise equal on all of them.

#if defined(TANDEM_KERNELS_CPU_STOCHASTIC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_STOCHASTIC_INL_H_
#undef TANDEM_KERNELS_CPU_STOCHASTIC_INL_H_
#else
#define TANDEM_KERNELS_CPU_STOCHASTIC_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/philox-inl.h"
#include "kernels/cpu/quantize-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// The codes of magnitudes below four times the format's largest number, with exponents that
/// continue above it. The upper neighbour is chosen if (word >> 8) 2^-24 is below the fraction of
/// the distance to it.
template <Fp8Format kFormat, class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> stochastic_codes(
    D d, hn::Vec<D> magnitude, hn::Vec<hn::RebindToUnsigned<D>> word) {
  constexpr Fp8Traits kTraits = traits_of(kFormat);
  const hn::RebindToSigned<D> di;
  const hn::RebindToUnsigned<D> du;
  const auto min_normal = hn::Set(di, static_cast<int32_t>(kTraits.min_normal_bits()));
  const auto power =
      hn::Max(hn::And(hn::BitCast(di, magnitude), hn::Set(di, 0x7F800000)), min_normal);
  // 2^mantissa_bits / power. It is exact, and so is its product with the magnitude.
  const auto per_step =
      hn::BitCast(d, hn::Sub(hn::Set(di, (254 + kTraits.mantissa_bits) << 23), power));
  const auto steps = hn::Mul(magnitude, per_step);
  const auto low = hn::ConvertTo(di, steps);
  const auto way = hn::Sub(steps, hn::ConvertTo(d, low));
  const auto chance =
      hn::Mul(hn::ConvertTo(d, hn::BitCast(di, hn::ShiftRight<8>(word))), hn::Set(d, 0x1p-24f));
  const auto binades = hn::ShiftRight<kTraits.dropped_bits()>(hn::Sub(power, min_normal));
  const auto up = hn::IfThenElseZero(hn::RebindMask(di, hn::Lt(chance, way)), hn::Set(di, 1));
  return hn::BitCast(du, hn::Add(hn::Add(binades, low), up));
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_STOCHASTIC_INL_H_
