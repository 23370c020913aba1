#include "kernels/bfloat16.h"

#include <algorithm>
#include <atomic>

#include "kernels/cpu/targets.h"
#include "kernels/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/bfloat16.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

bool narrow_piece(const float* x, size_t count, uint16_t* out) {
  const hn::ScalableTag<uint32_t> d;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  const size_t lanes = hn::Lanes(d);
  const auto* bits = reinterpret_cast<const uint32_t*>(x);
  const auto low_half = hn::Set(d, 0xFFFFu), magnitude = hn::Set(d, 0x7FFFFFFFu),
             exponent = hn::Set(d, 0x7F800000u);
  // Bits that bfloat16 lacks, and bits of denormal elements.
  auto lost = hn::Zero(d), denormal = hn::Zero(d);
  const auto look = [&](auto v) HWY_ATTR {
    lost = hn::Or(lost, hn::And(v, low_half));
    const auto has_no_exponent = hn::Eq(hn::And(v, exponent), hn::Zero(d));
    denormal = hn::Or(denormal, hn::IfThenElseZero(has_no_exponent, hn::And(v, magnitude)));
    return hn::TruncateTo(d16, hn::ShiftRight<16>(v));
  };
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(look(hn::LoadU(d, bits + i)), d16, out + i);
  bool fits = hn::AllTrue(d, hn::Eq(hn::Or(lost, denormal), hn::Zero(d)));
  for (; i < count; ++i) {
    const uint32_t v = bits[i];
    fits = fits && (v & 0xFFFFu) == 0 && ((v & 0x7F800000u) != 0 || (v & 0x7FFFFFFFu) == 0);
    out[i] = static_cast<uint16_t>(v >> 16);
  }
  return fits;
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(narrow_piece);

bool to_bfloat16_if_exact(const float* x, size_t count, uint16_t* out) {
  constexpr size_t kPiece = 1 << 14;
  std::atomic<bool> is_exact{true};
  const auto pieces = static_cast<int64_t>((count + kPiece - 1) / kPiece);
  parallel_for(0, pieces, 4, [&](int64_t first, int64_t last) {
    for (auto piece = static_cast<size_t>(first); piece < static_cast<size_t>(last); ++piece) {
      if (!is_exact.load(std::memory_order_relaxed)) return;
      const size_t begin = piece * kPiece, size = std::min(kPiece, count - begin);
      if (!HWY_DYNAMIC_DISPATCH(narrow_piece)(x + begin, size, out + begin))
        is_exact.store(false, std::memory_order_relaxed);
    }
  });
  return is_exact.load(std::memory_order_relaxed);
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
