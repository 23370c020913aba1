// Matrices of any Element for tests of kernels: values go in and come out as float.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/views.h"

namespace tandem::testing {

inline const std::vector<kernels::Element> kElements = {
    kernels::Element::float32, kernels::Element::bfloat16, kernels::Element::float16};

inline std::string name_of(kernels::Element element) {
  return element == kernels::Element::float32    ? "float32"
         : element == kernels::Element::bfloat16 ? "bfloat16"
                                                 : "float16";
}

/// The bits of `value` rounded to an element of 16 bits, nearest even; NaN becomes a quiet NaN.
inline uint16_t round_to_bits(float value, kernels::Element element) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (element == kernels::Element::bfloat16) {
    if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const double magnitude = std::abs(static_cast<double>(value));
  if (std::isnan(value)) return sign | 0x7E00;
  if (magnitude >= 65520.0) return sign | 0x7C00;
  if (magnitude == 0.0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), -14);
  const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return static_cast<uint16_t>(sign | (static_cast<uint32_t>(exponent + 14) * 1024 + steps));
}

/// The value of an element of 16 bits.
inline float value_of_bits(uint16_t bits, kernels::Element element) {
  if (element == kernels::Element::bfloat16)
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  const int field = (bits >> 10) & 31, mantissa = bits & 1023;
  float value = 0.0f;
  if (field == 31) {
    value = mantissa != 0 ? std::nanf("") : INFINITY;
  } else {
    value = static_cast<float>(
        std::ldexp(field > 0 ? 1024 + mantissa : mantissa, std::max(field, 1) - 25));
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

/// `value` as memory of an element gives it back.
inline float rounded(float value, kernels::Element element) {
  return element == kernels::Element::float32
             ? value
             : value_of_bits(round_to_bits(value, element), element);
}

/// Bytes that end where a page begins that nobody may touch: a kernel that reads or writes behind
/// them ends the program, on every instruction set and without a sanitizer.
class GuardedBytes {
 public:
  GuardedBytes(size_t size, uint8_t value) : size_(size) {
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    const size_t whole = (size + page - 1) / page * page;
    void* const memory = ::mmap(nullptr, whole + page, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, /*offset=*/0);
    if (memory == MAP_FAILED || ::mprotect(static_cast<uint8_t*>(memory) + whole, page, PROT_NONE))
      throw std::bad_alloc();
    pages_ = {static_cast<uint8_t*>(memory), Unmap{whole + page}};
    data_ = pages_.get() + whole - size;
    std::memset(data_, value, size);
  }
  GuardedBytes(const GuardedBytes& other) : GuardedBytes(other.size_, 0) {
    std::memcpy(data_, other.data_, size_);
  }
  GuardedBytes(GuardedBytes&&) noexcept = default;
  GuardedBytes& operator=(GuardedBytes other) noexcept {
    std::swap(pages_, other.pages_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  uint8_t operator[](size_t i) const { return data_[i]; }

 private:
  struct Unmap {
    size_t size;
    void operator()(uint8_t* pages) const { ::munmap(pages, size); }
  };
  std::unique_ptr<uint8_t, Unmap> pages_;
  uint8_t* data_ = nullptr;
  size_t size_;
};

/// A matrix with `gap` unused elements behind each row; they hold a mark, and `gaps_untouched` says
/// whether a kernel left it alone. Nothing may touch what is behind the last one.
class Matrix {
 public:
  Matrix(kernels::Element element, size_t rows, size_t cols, size_t gap = 0)
      : element_(element),
        rows_(rows),
        cols_(cols),
        stride_(cols + gap),
        bytes_(rows * stride_ * bytes_per_element(element), kMark) {}

  static Matrix random(kernels::Element element, size_t rows, size_t cols, size_t gap,
                       uint32_t seed) {
    Matrix matrix(element, rows, cols, gap);
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < rows * cols; ++i) matrix.set(i, normal(engine));
    return matrix;
  }

  kernels::Element element() const { return element_; }
  size_t rows() const { return rows_; }
  size_t cols() const { return cols_; }
  size_t size() const { return rows_ * cols_; }

  void set(size_t i, float value) {
    uint8_t* to = bytes_.data() + offset_of(i);
    if (element_ == kernels::Element::float32) {
      std::memcpy(to, &value, 4);
    } else {
      const uint16_t bits = round_to_bits(value, element_);
      std::memcpy(to, &bits, 2);
    }
  }

  float at(size_t i) const {
    if (element_ == kernels::Element::float32) return std::bit_cast<float>(bits_at(i));
    return value_of_bits(static_cast<uint16_t>(bits_at(i)), element_);
  }

  uint32_t bits_at(size_t i) const {
    uint32_t bits = 0;
    std::memcpy(&bits, bytes_.data() + offset_of(i), bytes_per_element(element_));
    return bits;
  }

  std::vector<float> values() const {
    std::vector<float> values(size());
    for (size_t i = 0; i < size(); ++i) values[i] = at(i);
    return values;
  }

  std::vector<uint32_t> bits() const {
    std::vector<uint32_t> bits(size());
    for (size_t i = 0; i < size(); ++i) bits[i] = bits_at(i);
    return bits;
  }

  bool gaps_untouched() const {
    const size_t width = bytes_per_element(element_);
    for (size_t r = 0; r < rows_; ++r) {
      for (size_t b = (r * stride_ + cols_) * width; b < (r + 1) * stride_ * width; ++b) {
        if (bytes_[b] != kMark) return false;
      }
    }
    return true;
  }

  kernels::Rows view() { return {bytes_.data(), element_, rows_, cols_, stride_}; }
  kernels::ConstRows view() const { return {bytes_.data(), element_, rows_, cols_, stride_}; }
  /// The first row as a vector.
  kernels::Vector vector() { return {bytes_.data(), element_, cols_}; }
  kernels::ConstVector parameter() const { return {bytes_.data(), element_, cols_}; }

 private:
  static constexpr uint8_t kMark = 0xA5;
  size_t offset_of(size_t i) const {
    return (i / cols_ * stride_ + i % cols_) * bytes_per_element(element_);
  }

  kernels::Element element_;
  size_t rows_, cols_, stride_;
  GuardedBytes bytes_;
};

}  // namespace tandem::testing
