// Products of complex numbers as products of real ones: k complex numbers are 2 k real ones in memory, and each element
// x + yi of a weight is a matrix [x, y; -y, x].
#pragma once
#include <c10/util/complex.h>

#include <cstdint>

#include "buffer.h"
#include "gemm.h"

namespace ftbptt {

// As Gemm (see there). Sizes and strides count complex numbers.
template <typename T>
struct ComplexGemm {
  using Number = c10::complex<T>;

  static constexpr int64_t packed_size(int64_t k, int64_t n) { return Gemm<T>::packed_size(2 * k, 2 * n) / 2; }

  static constexpr int64_t panels(int64_t k, int64_t n) { return Gemm<T>::panels(2 * k, 2 * n); }

  static void pack(const Number* b, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n, Number* packed,
                   int64_t first, int64_t last) {
    const Buffer<T> parts(4 * k * n);
    for (int64_t i = 0; i < k; ++i) {
      T* const real = parts.data() + 4 * i * n;
      T* const imag = real + 2 * n;  // the row that the imaginary part of a is multiplied with
      for (int64_t j = 0; j < n; ++j) {
        const Number x = b[i * stride_k + j * stride_n];
        real[2 * j] = x.real();
        real[2 * j + 1] = x.imag();
        imag[2 * j] = -x.imag();
        imag[2 * j + 1] = x.real();
      }
    }
    Gemm<T>::pack(parts.data(), 2 * n, 1, 2 * k, 2 * n, reinterpret_cast<T*>(packed), first, last);
  }

  template <int64_t k, int64_t n>
  static void run(int64_t rows, const Number* a, int64_t lda, const Number* packed, Number* c, int64_t ldc,
                  int64_t first, int64_t last) {
    Gemm<T>::template run<2 * k, 2 * n>(rows, reinterpret_cast<const T*>(a), 2 * lda,
                                        reinterpret_cast<const T*>(packed), reinterpret_cast<T*>(c), 2 * ldc, first,
                                        last);
  }
};

}  // namespace ftbptt
