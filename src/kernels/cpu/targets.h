// The instruction sets that kernels are compiled for: AVX3 (AVX-512), AVX2 and, elsewhere, one
// portable baseline. Every file with vector code includes this before any header of Highway.
#pragma once

// SSSE3 and SSE4 are left out, because each target costs compile time: processors without AVX2 get
// the baseline. SVE is left out because its vectors cannot be held in arrays; NEON replaces it.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif

namespace tandem::kernels::cpu {

/// Whether the processor has AVX512-BF16, which no target of Highway 1.0.3 covers.
#if defined(__x86_64__) || defined(__i386__)
inline const bool has_bfloat16_instructions = __builtin_cpu_supports("avx512bf16") != 0;
#else
inline constexpr bool has_bfloat16_instructions = false;
#endif

}  // namespace tandem::kernels::cpu
