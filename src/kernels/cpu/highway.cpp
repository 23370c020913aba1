// The functions that Highway's headers expect from its library. That library is not linked, because
// distributions ship it as a shared one, and an installed Tandem must load without it. The
// functions are hidden, so they do not clash with another Highway in the process.
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "kernels/cpu/targets.h"
// clang-format off
#include "hwy/aligned_allocator.h"
#include "hwy/targets.h"
// clang-format on
#if HWY_ARCH_X86
#include <cpuid.h>
#endif

namespace hwy {

namespace {

int64_t targets_for_test = 0;

#if HWY_ARCH_X86
/// Whether bit `bit` of register ECX of a cpuid leaf is set, for features that compilers do not all
/// name.
bool ecx_bit(unsigned leaf, unsigned bit) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(leaf, &a, &b, &c, &d) != 0 && (c >> bit & 1U) != 0;
}

/// The targets AVX2 and AVX-512 as Highway compiles them. The compiler's check also tests whether
/// the operating system saves the wide registers.
int64_t detect() {
  __builtin_cpu_init();
  const bool f16c = ecx_bit(1, 29), lzcnt = ecx_bit(0x80000001U, 5), aes = ecx_bit(1, 25);
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("pclmul") && f16c && lzcnt && aes;
  const bool avx3 = avx2 && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512bw");
  return (avx2 ? HWY_AVX2 : 0) | (avx3 ? HWY_AVX3 : 0);
}
#else
int64_t detect() { return 0; }  // only the static targets are compiled
#endif

/// The targets up to the instruction set in TANDEM_MAX_CPU_ISA; all targets if it is not set.
int64_t allowed() {
  const char* const given = std::getenv("TANDEM_MAX_CPU_ISA");
  const std::string_view best = given != nullptr ? given : "avx512";
  if (best == "avx512") return HWY_AVX3 | HWY_AVX2;
  if (best == "avx2") return HWY_AVX2;
  if (best == "baseline") return 0;
  throw std::invalid_argument("TANDEM_MAX_CPU_ISA: expected avx512, avx2 or baseline, got \"" +
                              std::string(best) + "\". Set it to one of these, or unset it.");
}

}  // namespace

int64_t SupportedTargets() {
  static const int64_t detected = (detect() & allowed()) | HWY_STATIC_TARGET;
  return targets_for_test != 0 ? targets_for_test : detected;
}

void SetSupportedTargetsForTest(int64_t targets) { targets_for_test = targets; }

ChosenTarget& GetChosenTarget() {
  static ChosenTarget chosen;
  return chosen;
}

/// Memory that is aligned for any vector; nullptr if there is none. Buffers at equal offsets in a
/// page evict each other from the cache, so each gets another offset than the one before.
void* AllocateAlignedBytes(size_t payload_size, AllocPtr, void*) {
  constexpr size_t kAlignment = 128, kApart = 1024, kPlaces = 8;
  static std::atomic<size_t> count{0};
  const size_t offset = kAlignment + count.fetch_add(1) % kPlaces * kApart;
  const size_t padded = (offset + payload_size + kAlignment - 1) / kAlignment * kAlignment;
  if (padded < payload_size) return nullptr;
  char* const block = static_cast<char*>(std::aligned_alloc(kAlignment, padded));
  if (block == nullptr) return nullptr;
  char* const payload = block + offset;
  reinterpret_cast<void**>(payload)[-1] = block;
  return payload;
}

void FreeAlignedBytes(const void* payload, FreePtr, void*) {
  if (payload != nullptr) std::free(static_cast<void* const*>(payload)[-1]);
}

void Abort(const char* file, int line, const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "%s:%d: ", file, line);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
  std::abort();  // an assumption of Highway's own checks is broken
}

}  // namespace hwy
