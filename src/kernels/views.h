// Raw views that kernels take: a pointer, an element type, a shape. They know no torch, own no
// memory and check nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::kernels {

/// Element types of kernels. Arithmetic is float32, and a result is rounded once, to nearest even.
enum class Element : uint8_t { float32, bfloat16, float16 };

constexpr size_t bytes_per_element(Element element) { return element == Element::float32 ? 4 : 2; }

/// A matrix whose rows are contiguous and lie `stride` elements apart. `data` is null where an
/// optional operand is absent.
struct ConstRows {
  const void* data = nullptr;
  Element element = Element::float32;
  size_t rows = 0, cols = 0;
  /// Elements from one row to the next: at least cols, or 0 to repeat one row.
  size_t stride = 0;
  explicit operator bool() const { return data != nullptr; }
};

/// A ConstRows that kernels write. Its rows do not overlap (stride >= cols).
struct Rows {
  void* data = nullptr;
  Element element = Element::float32;
  size_t rows = 0, cols = 0;
  size_t stride = 0;
  explicit operator bool() const { return data != nullptr; }
  operator ConstRows() const { return {data, element, rows, cols, stride}; }
};

/// The sizes of a contiguous matrix that a kernel lays out, with padding.
struct MatrixShape {
  size_t rows = 0, cols = 0;
  constexpr size_t size() const { return rows * cols; }
};

/// A contiguous vector, such as a parameter. `data` is null where an optional operand is absent.
struct ConstVector {
  const void* data = nullptr;
  Element element = Element::float32;
  size_t size = 0;
  explicit operator bool() const { return data != nullptr; }
};

/// A ConstVector that kernels write.
struct Vector {
  void* data = nullptr;
  Element element = Element::float32;
  size_t size = 0;
  explicit operator bool() const { return data != nullptr; }
};

}  // namespace tandem::kernels
