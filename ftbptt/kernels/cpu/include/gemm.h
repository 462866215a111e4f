// Single-thread GEMM: c[rows, n] = a[rows, k] @ b[k, n], or added to c, where b is packed once and then multiplied many
// times, as at every step of a loop. a and c are row-major and may be unaligned; packed must be 64-byte aligned. n > 0;
// rows and k may be 0. NaN and inf propagate as in a plain loop.
//
// Packed layout: b is cut into panels of at most `width(k, n)` vectors of columns (balanced, so the widths of one
// matrix differ by at most one vector; only the last vector is padded, with zeros), each stored row after row. The
// product goes panel by panel, and in a panel block by block of rows: a block keeps its [rows, panel] piece of c in
// registers over the whole of k, and reads b as one contiguous stream. k is not blocked: a panel is read again from L2
// for every block of rows, at 1/3 of what L2 can deliver, and that costs less than to store and reload c.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "panel.h"

namespace ftbptt {

template <typename T>  // hidden as in panel.h
struct __attribute__((visibility("hidden"))) Gemm {
  static constexpr int64_t packed_size(int64_t k, int64_t n) { return k * vectors(n) * kLanes; }

  static constexpr int64_t panels(int64_t k, int64_t n) { return (vectors(n) + width(k, n) - 1) / width(k, n); }

  // Packs b[i, j] = b[i * stride_k + j * stride_n]; panels first .. last - 1 only, so that threads can share the work.
  template <typename S>
  static void pack(const S* b, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n, T* packed, int64_t first,
                   int64_t last) {
    const int64_t count = panels(k, n), base = vectors(n) / count, wider = vectors(n) % count;
    for (int64_t p = first; p < last; ++p) {
      const int64_t begin = (p * base + std::min(p, wider)) * kLanes, columns = (base + (p < wider)) * kLanes;
      const int64_t real = std::min(columns, n - begin);
      const S* in = b + begin * stride_n;
      T* out = packed + begin * k;
      if (stride_n == 1) {
        for (int64_t i = 0; i < k; ++i)
          for (int64_t j = 0; j < columns; ++j)
            out[i * columns + j] = j < real ? static_cast<T>(in[i * stride_k + j]) : T(0);
        continue;
      }
      // 16 rows at a time: the lines in use stay in L1
      for (int64_t first_row = 0; first_row < k; first_row += 16) {
        const int64_t last_row = std::min(k, first_row + 16);
        for (int64_t j = 0; j < columns; ++j)
          for (int64_t i = first_row; i < last_row; ++i)
            out[i * columns + j] = j < real ? static_cast<T>(in[i * stride_k + j * stride_n]) : T(0);
      }
    }
  }

  static void run(int64_t rows, int64_t k, int64_t n, const T* a, int64_t lda, const T* packed, T* c, int64_t ldc,
                  bool add = false) {
    using Widths = std::conditional_t<kMaxWidth == 4, std::integer_sequence<int, 1, 2, 3, 4>,
                                      std::integer_sequence<int, 1, 2, 3>>;
    multiply(Widths(), Prefetches<kNothing, kLines, kNextPanel>(), rows, k, n, a, lda, packed, c, ldc, 0, panels(k, n),
             add);
  }

  // The same for a k and n that the compiler knows: it compiles only the panels that occur in it. Computes the columns
  // of panels first .. last - 1 only, so that threads can share the work.
  template <int64_t k, int64_t n>
  static void run(int64_t rows, const T* a, int64_t lda, const T* packed, T* c, int64_t ldc, int64_t first,
                  int64_t last) {
    constexpr int narrow = vectors(n) / panels(k, n);
    using Widths = std::conditional_t<vectors(n) % panels(k, n) == 0, std::integer_sequence<int, narrow>,
                                      std::integer_sequence<int, narrow, narrow + 1>>;
    using InCache = Prefetches<bytes(k, n) <= kSmall ? kNothing : kLines>;
    using Any = std::conditional_t<bytes(k, n) < kOutsideL2, InCache, Prefetches<kLines, kNextPanel>>;
    multiply(Widths(), Any(), rows, k, n, a, lda, packed, c, ldc, first, last, false);
  }

 private:
  static constexpr int64_t kLanes = Lanes<T>::kCount;
  static constexpr int kMaxWidth = Lanes<T>::kRegisters >= 32 ? 4 : 3;
  // Sizes of a packed b in bytes. From kOutsideL2 on we assume that b is read from L3 at each step, since a cell has
  // several weights. If b does stay in L2, prefetching the next panel costs nothing measurable.
  static constexpr int64_t kSmall = 64 << 10, kOutsideL2 = 512 << 10;

  static constexpr int64_t vectors(int64_t n) { return (n + kLanes - 1) / kLanes; }
  static constexpr int64_t bytes(int64_t k, int64_t n) { return packed_size(k, n) * int64_t(sizeof(T)); }

  // 9 rows x 3 vectors read the fewest bytes per FMA, which matters most once b comes from L2 or beyond. A matrix that
  // stays in L1 is typically the weight of a small cell with few rows, where 4 vectors give more independent sums (with
  // 16 registers, 4 rows x 3 vectors are best for both).
  static constexpr int64_t width(int64_t k, int64_t n) {
    return bytes(k, n) <= kSmall ? kMaxWidth : kPrefetchedWidth;
  }

  template <Ahead... A>
  struct Prefetches {};

  // W and A: the widths of panels and the ways to prefetch that may occur.
  template <int... W, Ahead... A>
  static void multiply(std::integer_sequence<int, W...>, Prefetches<A...> any, int64_t rows, int64_t k, int64_t n,
                       const T* a, int64_t lda, const T* packed, T* c, int64_t ldc, int64_t first, int64_t last,
                       bool add) {
    const int64_t count = panels(k, n), base = vectors(n) / count, wider = vectors(n) % count;
    const auto begin = [&](int64_t p) { return (p * base + std::min(p, wider)) * kLanes; };  // its first column
    Ahead ahead = kLines;
    if (bytes(k, n) <= kSmall) ahead = kNothing;
    if (bytes(k, n) >= kOutsideL2 && rows > Panel<T, kPrefetchedWidth>::kMaxRows) ahead = kNextPanel;
    for (int64_t p = first; p < last; ++p) {
      const int64_t size = base + (p < wider), tail = p + 1 == count ? n - (vectors(n) - 1) * kLanes : kLanes;
      const T* const b = packed + begin(p) * k;
      const T* const next = packed + begin(p + 1 == last ? first : p + 1) * k;
      ((size == W ? panel<W>(any, ahead, rows, k, a, lda, b, next, c + begin(p), ldc, tail, add) : void()), ...);
    }
  }

  template <int W, Ahead... A, typename... Args>
  static void panel(Prefetches<A...>, Ahead ahead, Args... args) {
    if constexpr (W == kPrefetchedWidth)
      ((ahead == A ? Panel<T, W, A>::run(args...) : void()), ...);
    else
      Panel<T, W>::run(args...);
  }
};

}  // namespace ftbptt
