// The floating-point mode in which results are specified, whatever mode the calling thread has set.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace tandem::kernels::cpu {

/// During its lifetime this thread rounds to nearest even and keeps subnormals. Then the former
/// mode is restored.
class ScopedFloatMode {
 public:
  ScopedFloatMode() : saved_(read()) { write(saved_ & ~kFlags); }
  ~ScopedFloatMode() { write(saved_); }
  ScopedFloatMode(const ScopedFloatMode&) = delete;
  ScopedFloatMode& operator=(const ScopedFloatMode&) = delete;

 private:
#if defined(__x86_64__) || defined(__i386__)
  using Word = uint32_t;
  static constexpr Word kFlags =
      0x8000u | 0x6000u | 0x0040u;  // flush to zero, rounding mode, denormals are zero
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kFlags = 7ull << 22;  // flush to zero, rounding mode
  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
  using Word = uint32_t;
  static constexpr Word kFlags = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif

  Word saved_;
};

/// dividend / divisor, rounded once. `volatile` stops the compiler from moving the division out of
/// the scope of the mode.
inline float divide(float dividend, float divisor) {
  const ScopedFloatMode mode;
  volatile float operand = divisor;
  volatile float quotient = dividend / operand;
  return quotient;
}

/// `number` as float32, rounded once, with `volatile` for the same reason.
inline float rounded(double number) {
  const ScopedFloatMode mode;
  volatile double operand = number;
  volatile auto nearest = static_cast<float>(operand);
  return nearest;
}

}  // namespace tandem::kernels::cpu
