// Where the packed bytes of a linear layer lie. Output channels are cut into tiles of kLanes; each tile is one contiguous
// panel, read front to back, so that a product streams the weights once.
//
//   f32, f16  panel: [k_padded][kLanes] values
//   bf16      panel: [k_padded / 2][kLanes][2] values: two consecutive k per 32-bit slot
//   w8        panel: [k_padded / 32] groups of: 8 steps [kLanes][4] int8 (step s holds k = 4s .. 4s+3 of the group),
//             then fp16 scales [32 / group][kLanes], then fp16 mins likewise if there are mins
//   w4        panel: [k_padded / 32] groups of: 4 pairs of steps [kLanes][4] bytes (pair s holds k = 4s .. 4s+3 in the low
//             and k = 4s+16 .. 4s+19 in the high nibbles), then fp16 scales [kLanes], then fp16 mins [kLanes] if there are
// Channels beyond n and inputs beyond k are zero, scales included.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {

struct Layout {
  int64_t tiles;              // of kLanes channels
  int64_t groups;             // of kGroup inputs
  int scales_per_group;       // per channel: w8 with groups of 16 has 2
  size_t group_bytes;         // of one tile
  size_t scales_at, mins_at;  // offsets in a group
  size_t panel_bytes;         // of one tile
};

inline Layout layout_of(WeightKind kind, int64_t n, int64_t k_padded, int group, bool has_mins) {
  Layout l{};
  l.tiles = (n + kLanes - 1) / kLanes;
  l.groups = k_padded / kGroup;
  switch (kind) {
    case WeightKind::f32:
      l.group_bytes = size_t(kGroup) * kLanes * 4;
      break;
    case WeightKind::f16:
    case WeightKind::bf16:
      l.group_bytes = size_t(kGroup) * kLanes * 2;
      break;
    case WeightKind::w8:
    case WeightKind::w4: {
      l.scales_per_group = kind == WeightKind::w8 ? kGroup / group : 1;
      const size_t one = size_t(l.scales_per_group) * kLanes * 2;
      l.scales_at = size_t(kGroup) * kLanes / (kind == WeightKind::w4 ? 2 : 1);
      l.mins_at = l.scales_at + one;
      l.group_bytes = l.mins_at + (has_mins ? one : 0);
      break;
    }
  }
  l.panel_bytes = l.group_bytes * size_t(l.groups);
  return l;
}

inline Layout layout_of(const PackedW& w) { return layout_of(w.kind, w.n, w.k_padded, w.group, w.has_mins); }

inline int64_t pad_k(int64_t k) { return (k + kGroup - 1) / kGroup * kGroup; }

}  // namespace octavo::OCTAVO_NS
