// Which rows a thread takes, and when threads share the products of the same rows.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "buffer.h"

namespace ftbptt {

// How many threads to use for ``work`` multiplications, or what takes as long: one, unless all of them are at least 1.5
// times as fast. To wake them takes as long as ``waking`` multiplications; but where other programs keep their cores
// busy, it takes a time slice of the system's, a hundred times what a small kernel takes.
inline int64_t threads_for(int64_t work, int64_t waking) {
  const int64_t threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  return 2 * work * threads >= 3 * (work + waking * threads) ? threads : 1;
}

// Rows whose steps are run before those of the next tile. The rows of a group share all weights. Rows begin .. end - 1
// of the tile are the calling thread's, for all but products.
struct Tile {
  int64_t group, first, rows, begin, end;
};

// Which part of a tensor is a row's: ``row / after % count``, for one row after the other, without a division for each.
struct Part {
  int64_t after, count, index, left;  // rows until the next part

  Part(int64_t row, int64_t after, int64_t count)
      : after(after), count(count), index(row / after % count), left(after - row % after) {}

  void next() {
    if (--left > 0) return;
    left = after;
    if (++index == count) index = 0;
  }
};

// When threads share the products of a tile.
struct Sharing {
  int64_t few;   // if there are at most so many rows for each of them
  int64_t most;  // not more threads than these
};

// ``total`` rows in ``groups`` of equal size, split between threads into tiles of at most ``most`` rows.
//
// Either each thread has tiles of its own: at least one per thread, if there are that many rows. Or, where that leaves
// a thread few rows to read large weights for, all threads take the same tile: each computes some columns of a product,
// and all else for some of the rows, and waits for the others in between.
struct Tiles {
  int64_t total, groups, parts, rows, threads;
  bool shared;

  Tiles(int64_t threads, int64_t total, int64_t groups, int64_t most, Sharing sharing) : total(total), groups(groups) {
    const int64_t size = total / std::max<int64_t>(groups, 1);
    const int64_t for_threads = (threads + groups - 1) / std::max<int64_t>(groups, 1);
    parts = std::max<int64_t>((size + most - 1) / most, std::min(for_threads, size));
    // The same number of tiles for each thread.
    if (parts > for_threads) parts = (parts + for_threads - 1) / for_threads * for_threads;
    parts = std::max<int64_t>(std::min(parts, size), 1);
    rows = (size + parts - 1) / parts;
    this->threads = total == 0 ? 1 : std::min(threads, groups * parts);
    // Groups are shared one after the other, which helps if there is none for each thread.
    const int64_t sharers = std::min(threads, sharing.most);
    shared = 0 < total && total <= sharing.few * sharers && groups < sharers;
    if (shared) {
      this->threads = sharers;
      parts = (size + most - 1) / most;
      rows = (size + parts - 1) / parts;
    }
  }

  // Part ``index`` of ``count`` parts of a tile's work.
  struct Share {
    int64_t index, count;
    int64_t begin(int64_t work) const { return work * index / count; }
    int64_t end(int64_t work) const { return work * (index + 1) / count; }
  };

  Share share_of_tile() const { return shared ? Share{omp_get_thread_num(), omp_get_num_threads()} : Share{0, 1}; }

  struct Range {
    const Tiles& tiles;
    int64_t first, last;  // tiles first .. last - 1
    struct Iterator {
      const Tiles& tiles;
      int64_t index;
      bool operator!=(const Iterator& other) const { return index != other.index; }
      void operator++() { ++index; }
      Tile operator*() const {
        const int64_t size = tiles.total / tiles.groups, group = index / tiles.parts;
        const int64_t part = index % tiles.parts, first = size * part / tiles.parts;
        const int64_t rows = size * (part + 1) / tiles.parts - first;
        const Share share = tiles.share_of_tile();
        return {group, group * size + first, rows, share.begin(rows), share.end(rows)};
      }
    };
    Iterator begin() const { return {tiles, first}; }
    Iterator end() const { return {tiles, last}; }
  };

  Range of_thread() const {
    const int64_t count = total == 0 ? 0 : groups * parts;
    const Share share = shared ? Share{0, 1} : Share{omp_get_thread_num(), omp_get_num_threads()};
    return {*this, share.begin(count), share.end(count)};
  }

  // Waits until all threads of the tile are here.
  void wait() const {
    if (shared) {
#pragma omp barrier
    }
  }

  // c = a @ b for the rows of a tile (see gemm.h): of the thread, or its share of the columns.
  template <typename G, int64_t k, int64_t n, typename T>
  void multiply(int64_t rows, const T* a, int64_t lda, const T* packed, T* c, int64_t ldc) const {
    const int64_t panels = G::panels(k, n);
    const Share share = share_of_tile();
    G::template run<k, n>(rows, a, lda, packed, c, ldc, share.begin(panels), share.end(panels));
  }
};

// ``count`` numbers for each tile that is worked on at a time.
template <typename T>
class Workspace {
 public:
  Workspace(const Tiles& tiles, int64_t count)
      : shared_(tiles.shared), stride_((count + kLine - 1) / kLine * kLine),
        all_((shared_ ? 1 : tiles.threads) * stride_) {}

  T* of_tile() const { return all_.data() + (shared_ ? 0 : omp_get_thread_num() * stride_); }

 private:
  static constexpr int64_t kLine = std::max<int64_t>(64 / sizeof(T), 1);

  bool shared_;
  int64_t stride_;
  Buffer<T> all_;
};

// The calling thread's share of packing ``count`` weights, as ``G`` multiplies them.
template <typename G, typename T, typename S>
void pack(const S* weight, const int64_t* strides, int64_t k, int64_t n, int64_t count, T* packed) {
  const int64_t panels = G::panels(k, n), work = count * panels;
  const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
  int64_t panel = work * thread / team;
  const int64_t end = work * (thread + 1) / team;
  while (panel < end) {
    const int64_t matrix = panel / panels, first = panel % panels;
    const int64_t last = std::min(panels, first + end - panel);
    G::pack(weight + matrix * strides[0], strides[1], strides[2], k, n, packed + matrix * G::packed_size(k, n), first,
            last);
    panel += last - first;
  }
}

}  // namespace ftbptt
