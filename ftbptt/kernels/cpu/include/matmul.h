// Single-thread c[m, n] = a[m, k] @ b[k, n] of matrices that are multiplied once: the sums over many steps and rows, and
// the products for all steps. a and b have any strides, c is row-major.
//
// k is cut into blocks, whose products are added up in c. Of a block, b is packed, and a is read where it lies if its
// rows are contiguous; otherwise it is copied, kRows rows at a time.
#pragma once
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>

#include "buffer.h"
#include "gemm.h"

namespace ftbptt {

template <typename T>
struct Strided {
  const T* data;
  int64_t row, column;  // strides

  const T* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

// Copies rows x columns to out, row by row.
template <typename T>
void copy_rows(Strided<T> from, int64_t rows, int64_t columns, T* out) {
  constexpr int64_t kTile = 16;
  if (from.row == 1) {
    for (int64_t j = 0; j < columns; j += kTile)
      for (int64_t i = 0; i < rows; i += kTile)
        at::vec::transpose_mxn<T>(from.at(i, j), from.column, out + i * columns + j, columns,
                                  std::min(kTile, columns - j), std::min(kTile, rows - i));
  } else {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) out[i * columns + j] = *from.at(i, j);
  }
}

template <typename T>
void matmul(int64_t m, int64_t n, int64_t k, Strided<T> a, Strided<T> b, T* c, int64_t ldc) {
  constexpr int64_t kDepth = 256, kRows = 144;
  if (m == 0 || n == 0) return;
  const int64_t blocks = std::max<int64_t>(1, (k + kDepth - 1) / kDepth), most = (k + blocks - 1) / blocks;
  const Buffer<T> packed(Gemm<T>::packed_size(most, n)), copied(a.column == 1 ? 0 : kRows * most);
  int64_t first = 0;
  do {
    const int64_t depth = std::min(most, k - first);
    Gemm<T>::pack(b.at(first, 0), b.row, b.column, depth, n, packed.data(), 0, Gemm<T>::panels(depth, n));
    for (int64_t i = 0; i < m; i += kRows) {
      const int64_t rows = std::min(kRows, m - i);
      const T* in = a.at(i, first);
      int64_t lda = a.row;
      if (a.column != 1) {
        copy_rows(Strided<T>{in, a.row, a.column}, rows, depth, copied.data());
        in = copied.data(), lda = depth;
      }
      Gemm<T>::run(rows, depth, n, in, lda, packed.data(), c + i * ldc, ldc, first > 0);
    }
    first += depth;
  } while (first < k);
}

}  // namespace ftbptt

// The function of a library of products of dtype T: run({a, b, c}, {m, n, k, strides of a and b, ldc}).
#define FTBPTT_MATMUL(T)                                                                                     \
  extern "C" void run(void* const* memory, const int64_t* numbers) {                                         \
    const ftbptt::Strided<T> a{static_cast<const T*>(memory[0]), numbers[3], numbers[4]};                     \
    const ftbptt::Strided<T> b{static_cast<const T*>(memory[1]), numbers[5], numbers[6]};                     \
    ftbptt::matmul(numbers[0], numbers[1], numbers[2], a, b, static_cast<T*>(memory[2]), numbers[7]);         \
  }
