// The products of gemm.h for a b of bfloat16, where the processor multiplies tiles of bfloat16 and adds in float (AMX).
// a, which is float here, is rounded to bfloat16, as a product of bfloat16 tensors has it. Elsewhere b is packed as
// float: the instructions for vectors of bfloat16 are slower than those for float (measured on Sapphire Rapids).
//
// Packed layout: panels of 16 columns, each with `pairs(k)` rows of 16 pairs (b[2i, j], b[2i + 1, j]), the last ones
// filled up with zeros: 16 rows are a tile.
#pragma once
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>

#include "buffer.h"
#include "gemm.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define FTBPTT_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ftbptt {

#ifndef FTBPTT_TILES
using HalfGemm = Gemm<float>;
#else

struct __attribute__((visibility("hidden"))) HalfGemm {
  // In elements of the packed type, which are pairs or, without tiles, floats.
  static int64_t packed_size(int64_t k, int64_t n) {
    return has_tiles() ? pairs(k) * panels(k, n) * kLanes : Gemm<float>::packed_size(k, n);
  }

  static int64_t panels(int64_t k, int64_t n) {
    return has_tiles() ? (n + kLanes - 1) / kLanes : Gemm<float>::panels(k, n);
  }

  template <typename S>
  static void pack(const S* b, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n, float* packed, int64_t first,
                   int64_t last) {
    if (!has_tiles()) return Gemm<float>::pack(b, stride_k, stride_n, k, n, packed, first, last);
    for (int64_t p = first; p < last; ++p) {
      auto* out = reinterpret_cast<c10::BFloat16*>(packed + p * pairs(k) * kLanes);
      const int64_t real = std::min(kLanes, n - p * kLanes);
      const S* in = b + p * kLanes * stride_n;
      std::fill_n(out, 2 * pairs(k) * kLanes, c10::BFloat16(0));
      for (int64_t first_row = 0; first_row < k; first_row += 16) {  // the lines in use stay in L1
        const int64_t last_row = std::min(k, first_row + 16);
        for (int64_t j = 0; j < real; ++j)
          for (int64_t i = first_row; i < last_row; ++i)
            out[(i / 2 * kLanes + j) * 2 + i % 2] = in[i * stride_k + j * stride_n];
      }
    }
  }

  template <int64_t k, int64_t n>
  static void run(int64_t rows, const float* a, int64_t lda, const float* packed, float* c, int64_t ldc, int64_t first,
                  int64_t last) {
    if (!has_tiles()) return Gemm<float>::run<k, n>(rows, a, lda, packed, c, ldc, first, last);
    const int64_t column = first * kLanes, columns = std::min(n, last * kLanes) - column;
    packed += first * pairs(k) * kLanes;
    static thread_local Buffer<c10::BFloat16> rounded(kRows * 2 * pairs(k));
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t count = std::min(rows - row, kRows);
      round(count, k, a + row * lda, lda, rounded.data());
      multiply(count, pairs(k), columns, rounded.data(), packed, c + row * ldc + column, ldc);
    }
  }

 private:
  static constexpr int64_t kLanes = 16, kRows = 32;  // of two tiles

  static constexpr int64_t pairs(int64_t k) { return (k + 31) / 32 * 16; }

  static void round(int64_t rows, int64_t k, const float* a, int64_t lda, c10::BFloat16* out) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = a + r * lda;
      for (int64_t i = 0; i < k; i += 32) {
        const int64_t left = std::min<int64_t>(k - i, 32);
        const __mmask32 mask = left == 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
        const __m512 low = _mm512_maskz_loadu_ps(__mmask16(mask), row + i);
        const __m512 high = _mm512_maskz_loadu_ps(__mmask16(mask >> 16), row + i + 16);
        _mm512_storeu_si512(out + r * 2 * pairs(k) + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
    }
  }

  // Whether Linux lets the process use tiles, which it has to be asked for.
  static bool has_tiles() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return granted;
  }

  struct alignas(64) Shapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };

  // c in tiles of 16 x 16, four at a time: 0 to 3. Tiles 4 and 5 are of a, 6 and 7 of b.
  static void multiply(int64_t rows, int64_t depth, int64_t n, const c10::BFloat16* a, const float* packed, float* c,
                       int64_t ldc) {
    const int64_t upper = std::min<int64_t>(rows, 16), lower = rows - upper;
    Shapes shapes;
    const int64_t sizes[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int i = 0; i < 8; ++i) {
      shapes.rows[i] = sizes[i];
      shapes.bytes[i] = sizes[i] > 0 ? 64 : 0;
    }
    _tile_loadconfig(&shapes);
    for (int64_t column = 0; column < n; column += 2 * kLanes, packed += 2 * depth * kLanes) {
      const bool two = column + kLanes < n;
      const float* const b[2] = {packed, packed + depth * kLanes};
      _tile_zero(0);
      if (two) _tile_zero(1);
      if (lower) _tile_zero(2);
      if (lower && two) _tile_zero(3);
      for (int64_t i = 0; i < depth; i += 16) {
        _tile_loadd(4, a + 2 * i, depth * 4);
        _tile_loadd(6, b[0] + i * kLanes, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two) {
          _tile_loadd(7, b[1] + i * kLanes, 64);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (lower) {
          _tile_loadd(5, a + upper * 2 * depth + 2 * i, depth * 4);
          _tile_dpbf16ps(2, 5, 6);
          if (two) _tile_dpbf16ps(3, 5, 7);
        }
      }
      store(0, upper, c + column, ldc, n - column);
      if (two) store(1, upper, c + column + kLanes, ldc, n - column - kLanes);
      if (lower) store(2, lower, c + upper * ldc + column, ldc, n - column);
      if (lower && two) store(3, lower, c + upper * ldc + column + kLanes, ldc, n - column - kLanes);
    }
    _tile_release();
  }

  static void store(int tile, int64_t rows, float* c, int64_t ldc, int64_t columns) {
    if (columns >= kLanes) return store_whole(tile, c, ldc);
    alignas(64) float whole[16 * kLanes];
    store_whole(tile, whole, kLanes);
    for (int64_t r = 0; r < rows; ++r) std::copy_n(whole + r * kLanes, columns, c + r * ldc);
  }

  static void store_whole(int tile, float* c, int64_t ldc) {
    switch (tile) {  // an instruction names its tile
      case 0: _tile_stored(0, c, ldc * 4); break;
      case 1: _tile_stored(1, c, ldc * 4); break;
      case 2: _tile_stored(2, c, ldc * 4); break;
      default: _tile_stored(3, c, ldc * 4); break;
    }
  }
};

#endif

}  // namespace ftbptt
